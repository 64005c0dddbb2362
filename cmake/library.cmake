# The library, shared and static, from one set of objects; and attn_faulty, a second build of it for the tests, in which
# every allocation, thread start and file operation can be made to fail.

# THE list of instruction sets: name and flags. Each gets the micro-kernels compiled for it once per real type, and
# ATTN_HAVE_<NAME>, by which src/cpu knows that the row exists. A new one costs its two lines here.
set(ATTN_ISAS c)
set(ATTN_ISA_FLAGS_c "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    list(APPEND ATTN_ISAS avx2 avx512)
    set(ATTN_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
    set(ATTN_ISA_FLAGS_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    list(APPEND ATTN_ISAS neon)
    set(ATTN_ISA_FLAGS_neon -DATTN_NEON=1) # no compiler flag: every aarch64 has it, and table c is to go without
    # gcc alone: clang takes the compiler's vector types to SVE's and back through memory.
    include(CheckCCompilerFlag)
    check_c_compiler_flag("-march=armv8.2-a+sve -msve-vector-bits=256" ATTN_COMPILER_HAS_SVE)
    if(ATTN_COMPILER_HAS_SVE AND CMAKE_C_COMPILER_ID STREQUAL "GNU")
        foreach(bits 256 512)
            list(APPEND ATTN_ISAS sve${bits})
            set(ATTN_ISA_FLAGS_sve${bits} -march=armv8.2-a+sve -msve-vector-bits=${bits})
        endforeach()
    endif()
endif()

# Tile loops are compiled once per real type, micro-kernels also once per ISA; the rest once.
set(src ${PROJECT_SOURCE_DIR}/src)
file(GLOB attn_core CONFIGURE_DEPENDS ${src}/*.c ${src}/ref/*.c ${src}/cpu/*.c ${src}/cuda/*.c)
set(attn_tiles ${src}/cpu/fwd.c ${src}/cpu/bwd.c ${src}/cpu/tile.c ${src}/cpu/probs.c)
set(attn_micro ${src}/cpu/micro.c)
set(attn_amx ${src}/cpu/bf16_amx.c)
list(REMOVE_ITEM attn_core ${attn_tiles} ${attn_micro} ${attn_amx})

# AMX: one file with flags of its own, where the compiler knows them.
set(ATTN_AMX_FLAGS -mamx-tile -mamx-bf16 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16)
if("avx512" IN_LIST ATTN_ISAS)
    include(CheckCCompilerFlag)
    string(REPLACE ";" " " attn_amx_flags "${ATTN_AMX_FLAGS}")
    check_c_compiler_flag("${attn_amx_flags}" ATTN_COMPILER_HAS_AMX)
endif()

include(cmake/cuda.cmake)

set(attn_isa_definitions "")
foreach(isa IN LISTS ATTN_ISAS)
    string(TOUPPER ${isa} name)
    list(APPEND attn_isa_definitions ATTN_HAVE_${name}=1)
endforeach()
if(ATTN_COMPILER_HAS_AMX)
    list(APPEND attn_isa_definitions ATTN_HAVE_AMX=1)
endif()

# One object library; remaining arguments are its sources.
function(attn_objects target)
    add_library(${target} OBJECT ${ARGN})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${src})
    target_compile_definitions(${target} PRIVATE ${attn_isa_definitions})
    target_link_libraries(${target} PRIVATE attn_flags)
endfunction()

# Every object of the library, compiled with the definitions that follow; sets ${tag}_objects for the caller.
function(attn_library_objects tag)
    attn_objects(${tag}_core ${attn_core})
    add_dependencies(${tag}_core attn_kernels)
    set(targets ${tag}_core)
    foreach(real f32 f64)
        attn_objects(${tag}_tiles_${real} ${attn_tiles})
        list(APPEND targets ${tag}_tiles_${real})
        set(kernels ${tag}_tiles_${real})
        foreach(isa IN LISTS ATTN_ISAS)
            attn_objects(${tag}_micro_${isa}_${real} ${attn_micro})
            target_compile_definitions(${tag}_micro_${isa}_${real} PRIVATE ATTN_ISA=${isa})
            target_compile_options(${tag}_micro_${isa}_${real} PRIVATE ${ATTN_ISA_FLAGS_${isa}})
            set_target_properties(${tag}_micro_${isa}_${real} PROPERTIES ATTN_FUSE ON) # multiply-add, where the ISA has it
            list(APPEND kernels ${tag}_micro_${isa}_${real})
        endforeach()
        foreach(target IN LISTS kernels)
            if(NOT ATTN_SANITIZE) # compiles for minutes with it, and gains nothing
                target_compile_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3>)
            endif()
            if(real STREQUAL "f64")
                target_compile_definitions(${target} PRIVATE ATTN_REAL_F64=1)
            endif()
        endforeach()
        list(APPEND targets ${kernels})
    endforeach()
    if(ATTN_COMPILER_HAS_AMX)
        attn_objects(${tag}_amx ${attn_amx})
        target_compile_options(${tag}_amx PRIVATE ${ATTN_AMX_FLAGS} $<$<NOT:$<CONFIG:Debug>>:-O3>)
        list(APPEND targets ${tag}_amx)
    endif()
    list(REMOVE_DUPLICATES targets)
    set(objects "")
    foreach(target IN LISTS targets)
        target_compile_definitions(${target} PRIVATE ${ARGN})
        list(APPEND objects $<TARGET_OBJECTS:${target}>)
    endforeach()
    set(${tag}_objects ${objects} PARENT_SCOPE)
endfunction()

attn_library_objects(attn)
add_library(attn_shared SHARED ${attn_objects})
add_library(attn_static STATIC ${attn_objects})
add_library(attn::attn ALIAS attn_shared)
add_library(attn::attn_static ALIAS attn_static)
set_target_properties(attn_shared PROPERTIES OUTPUT_NAME attn EXPORT_NAME attn LINKER_LANGUAGE C
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
set_target_properties(attn_static PROPERTIES OUTPUT_NAME attn LINKER_LANGUAGE C)
foreach(target attn_shared attn_static)
    target_include_directories(${target} PUBLIC
        $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:attn_flags> m Threads::Threads ${CMAKE_DL_LIBS})
endforeach()
