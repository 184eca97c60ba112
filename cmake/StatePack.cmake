# The functions that every folder uses.

# sp_library(NAME SOURCES ... LINK ... [PRIVATE_LINK ...] [INTERNAL]): one static library for one folder
# of src/. LINK names what its headers need, PRIVATE_LINK what only its sources need. INTERNAL: part of
# the program alone, so not installed, and nothing to vectorise.
define_property(GLOBAL PROPERTY SP_LIBRARIES BRIEF_DOCS "All libraries of ours, ground first.")
function(sp_library name)
  cmake_parse_arguments(ARG "INTERNAL" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  add_library(sp_${name} STATIC ${ARG_SOURCES})
  add_library(statepack::${name} ALIAS sp_${name})
  target_include_directories(sp_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  # Header-only, so programs that link the installed library need not have it.
  list(TRANSFORM ARG_PRIVATE_LINK REPLACE "^nlohmann_json::.*" "$<BUILD_INTERFACE:\\0>")
  target_link_libraries(sp_${name} PUBLIC ${ARG_LINK} PRIVATE ${ARG_PRIVATE_LINK})
  sp_options(sp_${name})
  if(NOT SP_SANITIZE AND NOT ARG_INTERNAL)  # -O2 of g++ 12 hardly vectorises
    target_compile_options(sp_${name} PRIVATE $<$<CONFIG:Release,RelWithDebInfo>:-O3>)
  endif()
  set_target_properties(sp_${name} PROPERTIES
    OUTPUT_NAME statepack_${name} EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
  if(NOT ARG_INTERNAL)
    set_property(GLOBAL APPEND PROPERTY SP_LIBRARIES sp_${name})
  endif()
endfunction()

# Options of every target of ours. -ffp-contract=off: a codec's bits and the reference recurrence are
# the same whatever instructions the compiler may use. -fno-math-errno and -fno-trapping-math only
# let loops vectorise; they change no result.
function(sp_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
    -ffp-contract=off -fno-math-errno -fno-trapping-math)
  if(SP_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(SP_SANITIZE)
    string(REPLACE ";" "," sanitizers "${SP_SANITIZE}")
    target_compile_options(${target} PRIVATE -fsanitize=${sanitizers} -fno-omit-frame-pointer
                                             -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${sanitizers})
    target_compile_definitions(${target} PRIVATE SP_SANITIZED=1)
  endif()
  if(SP_BUILD_FUZZ)  # coverage counters for libFuzzer; its main comes with sp_fuzz
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_options(${target} PUBLIC -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# sp_test(NAME SOURCES ... LINK ... [TIMEOUT s] [THREADS] [BOUNDS]): one GoogleTest program and one
# entry of ctest. THREADS marks a test whose threads share data: CI runs those under ThreadSanitizer.
# BOUNDS marks one that walks over memory by computed offsets or reads what comes from outside: CI runs
# those under AddressSanitizer. Each mark is a label of ctest and a target that builds its tests.
function(sp_test name)
  cmake_parse_arguments(ARG "THREADS;BOUNDS" "TIMEOUT" "SOURCES;LINK" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE SP_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  sp_options(${name})
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  foreach(mark THREADS BOUNDS)
    if(ARG_${mark})
      string(TOLOWER ${mark} label)
      set_property(TEST ${name} APPEND PROPERTY LABELS ${label})
      if(NOT TARGET ${label})
        add_custom_target(${label})
      endif()
      add_dependencies(${label} ${name})
    endif()
  endforeach()
endfunction()
