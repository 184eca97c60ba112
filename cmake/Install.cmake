# Install and export: the program, the static libraries, the public headers, and the files with which
# find_package(statepack) and pkg-config find them. Consumers link statepack::statepack.
include(CMakePackageConfigHelpers)

get_property(SP_LIBRARIES GLOBAL PROPERTY SP_LIBRARIES)
add_library(statepack_all INTERFACE)
add_library(statepack::statepack ALIAS statepack_all)
set_target_properties(statepack_all PROPERTIES EXPORT_NAME statepack)
target_link_libraries(statepack_all INTERFACE ${SP_LIBRARIES})

install(TARGETS statepack RUNTIME)
install(TARGETS statepack_all ${SP_LIBRARIES} EXPORT statepackTargets ARCHIVE)
install(DIRECTORY include/statepack TYPE INCLUDE)

set(SP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/statepack)
install(EXPORT statepackTargets NAMESPACE statepack:: DESTINATION ${SP_CMAKE_DIR})
configure_package_config_file(cmake/statepackConfig.cmake.in statepackConfig.cmake
                              INSTALL_DESTINATION ${SP_CMAKE_DIR})
write_basic_package_version_file(statepackConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/statepackConfig.cmake
              ${PROJECT_BINARY_DIR}/statepackConfigVersion.cmake
        DESTINATION ${SP_CMAKE_DIR})

# Static libraries only, so that their own needs stand under Libs and Requires, not under *.private:
# plain `pkg-config --libs` links. Users first, ground last, as the linker reads.
list(REVERSE SP_LIBRARIES)
list(TRANSFORM SP_LIBRARIES REPLACE "^sp_" "-lstatepack_")
list(JOIN SP_LIBRARIES " " SP_PC_LIBS)
file(RELATIVE_PATH SP_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" SP_PC_PREFIX "${SP_PC_PREFIX}")
configure_file(cmake/statepack.pc.in statepack.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/statepack.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
