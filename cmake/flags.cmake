# How everything is compiled: language level, warnings, sanitizers. The target attn_flags carries it; nothing leaks to
# consumers.
set(THREADS_PREFER_PTHREAD_FLAG OFF)
find_package(Threads REQUIRED)

add_library(attn_flags INTERFACE)
target_compile_options(attn_flags INTERFACE
    # Products and sums are rounded as written, on every compiler; targets with ATTN_FUSE, the micro-kernels, may fuse them.
    -ffp-contract=$<IF:$<BOOL:$<TARGET_PROPERTY:ATTN_FUSE>>,fast,off>
    -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes
    $<$<BOOL:${ATTN_WERROR}>:-Werror>)
set(CMAKE_C_STANDARD 11) # -std=c11 itself; a compile feature would be content with anything later
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(ATTN_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "ATTN_FUZZ wants clang (-DCMAKE_C_COMPILER=clang), not ${CMAKE_C_COMPILER_ID}")
    endif()
    target_compile_options(attn_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
# The presets with gcc's sanitizers leave -Werror out: its flow warnings see ghosts in instrumented code.
if(ATTN_SANITIZE)
    target_compile_options(attn_flags INTERFACE
        -fsanitize=${ATTN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(attn_flags INTERFACE -fsanitize=${ATTN_SANITIZE})
endif()
