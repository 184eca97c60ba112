// SP_CLONES: compile a plain loop function once for each instruction set that the machine may have.
//
// The loader picks the copy at start-up. All copies give the same bits: the build forbids fused
// multiply-add contraction and re-association, so wider vectors only do more lanes at a time. Loops
// that reduce across lanes must therefore name their lanes (see `LaneSum` users) and not rely on
// the compiler to split them. Sanitizer builds take the portable copy alone, because the loader's
// resolvers would run before the sanitizer's own start-up.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(SP_SANITIZED) && !defined(__clang__)
#define SP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SP_CLONES
#endif
