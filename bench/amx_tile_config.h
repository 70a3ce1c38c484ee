/* For building llama.cpp with GCC 12 on a CPU with AMX, where its products crash: that compiler's _tile_loadconfig says
   that it reads 8 bytes of the 64 it reads, so that the stores of the others may move behind it.
   CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-include /path/to/amx_tile_config.h'" pip install --no-binary llama-cpp-python ... */
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)) : "memory")
#endif
