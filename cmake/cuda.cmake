# GPU kernels: each FWD, FWD90, BWD, BWD90, DECODE and DECODE90 line of src/cuda/variants.def and each file of its PIECE lines becomes one fatbin, which
# src/cuda/images.c copies into the library. The host code of the cuda backend is compiled in any case; without kernels it says so.
#
#   ATTN_CUDA=AUTO     kernels when nvcc is found, or when ATTN_CUDA_KERNELS_DIR names a folder of ready-made ones
#   ATTN_CUDA=ON       the same, but an error when there is neither
#   ATTN_CUDA=OFF      none
#
# Fatbins depend on the device only, so all presets share one folder, and those of one machine serve on another.
set(ATTN_CUDA AUTO CACHE STRING "GPU kernels: AUTO (if nvcc is found), ON or OFF")
set_property(CACHE ATTN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ATTN_CUDA_KERNELS_DIR "" CACHE PATH "A folder of ready-made fatbins to embed instead of compiling them")
# sm_87 and sm_89 run the code of sm_80 or sm_86; what is newer than sm_90 compiles the PTX when it is loaded. All code comes from the PTX of
# compute_80: these kernels (but decode's, see below) have nothing that is newer, and the front end, up to half of the time, runs once.
set(ATTN_CUDA_ARCHS
    -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=sm_86
    -gencode arch=compute_80,code=sm_90 -gencode arch=compute_80,code=compute_80
    CACHE STRING "Code that the fatbins hold, as nvcc's -gencode; Hopper's own kernels have theirs")
# The kernels of FWD90, BWD90 and DECODE90 lines: wgmma and setmaxnreg are in sm_90a only, and PTX for it would compile for nothing else.
set(attn_hopper_archs -gencode arch=compute_90a,code=sm_90a)

set(cuda_src ${PROJECT_SOURCE_DIR}/src/cuda)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cuda_src}/variants.def)

# attn_images: names of the images; attn_line_NAME: what the table says of a kernel of a line of its own.
file(STRINGS ${cuda_src}/variants.def lines REGEX "^(FWD|FWD90|BWD|BWD90|DECODE|DECODE90|PIECE)\\(")
set(attn_images "")
foreach(line IN LISTS lines)
    if(line MATCHES "^(FWD|FWD90|BWD|BWD90|DECODE|DECODE90)\\( *([a-z0-9_]+) *,")
        set(name ${CMAKE_MATCH_2})
        set(attn_line_${name} "${line}")
    elseif(line MATCHES "^PIECE\\( *[a-z0-9_]+ *, *([a-z0-9_]+)\\.cu *\\)")
        set(name ${CMAKE_MATCH_1})
    else()
        message(FATAL_ERROR "src/cuda/variants.def: cannot read the line ${line}")
    endif()
    list(APPEND attn_images ${name})
endforeach()
list(REMOVE_DUPLICATES attn_images)

file(GLOB toolkits /usr/local/cuda /usr/local/cuda-*)
list(SORT toolkits COMPARE NATURAL ORDER DESCENDING) # the newest first
list(TRANSFORM toolkits APPEND /bin)
find_program(ATTN_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS ${toolkits} PATH_SUFFIXES bin
    DOC "NVIDIA's compiler, for the GPU kernels")

set(attn_kernels_dir "") # where the fatbins are, or will be; empty: none
set(attn_kernels none)
if(NOT ATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "ATTN_CUDA=${ATTN_CUDA}: want AUTO, ON or OFF")
elseif(ATTN_CUDA STREQUAL "OFF")
    message(STATUS "GPU kernels: none, as ATTN_CUDA=OFF says")
elseif(ATTN_CUDA_KERNELS_DIR)
    get_filename_component(attn_kernels_dir "${ATTN_CUDA_KERNELS_DIR}" ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
    foreach(name IN LISTS attn_images)
        if(NOT EXISTS ${attn_kernels_dir}/${name}.fatbin)
            message(FATAL_ERROR "ATTN_CUDA_KERNELS_DIR=${ATTN_CUDA_KERNELS_DIR}: ${name}.fatbin is not there")
        endif()
    endforeach()
    set(attn_kernels given)
    message(STATUS "GPU kernels: those in ${attn_kernels_dir}")
elseif(ATTN_NVCC)
    set(attn_kernels_dir ${PROJECT_SOURCE_DIR}/build/kernels)
    set(attn_kernels compiled)
    list(LENGTH attn_images count)
    message(STATUS "GPU kernels: ${count} files are compiled with ${ATTN_NVCC}; that takes minutes (ATTN_CUDA=OFF: none)")
elseif(ATTN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ATTN_CUDA=ON: nvcc is not found; set ATTN_NVCC or ATTN_CUDA_KERNELS_DIR")
else()
    message(STATUS "GPU kernels: none, nvcc is not found")
endif()

set(ATTN_KERNELS ${attn_kernels} CACHE INTERNAL "none, given or compiled: the scripts ask for it")

# The kernels of src/cuda/tune.def, for `attn tune`: no part of the library, and compiled only by `make tune-kernels`.
set(attn_tune_dir ${PROJECT_SOURCE_DIR}/build/tune-kernels)
set(attn_tune_archs -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=sm_90)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cuda_src}/tune.def)
file(STRINGS ${cuda_src}/tune.def lines REGEX "^FWD\\(")
set(attn_tunes "")
foreach(line IN LISTS lines)
    if(NOT line MATCHES "^FWD\\( *([a-z0-9_]+) *,")
        message(FATAL_ERROR "src/cuda/tune.def: cannot read the line ${line}")
    endif()
    set(name ${CMAKE_MATCH_1})
    if(DEFINED attn_line_${name})
        message(FATAL_ERROR "src/cuda/tune.def: ${name} is there twice, or in variants.def as well")
    endif()
    set(attn_line_${name} "${line}")
    list(APPEND attn_tunes ${name})
endforeach()

# One fatbin. A forward kernel is compiled again when its own line changes, not when others do: NAME.how has that line.
# The rest of the arguments are for nvcc, -gencode among them.
function(attn_add_kernel folder name)
    set(options "")
    set(source ${cuda_src}/${name}.cu)
    if(DEFINED attn_line_${name})
        set(source ${cuda_src}/fwd.cu)
        if(attn_line_${name} MATCHES "^FWD90")
            set(source ${cuda_src}/fwd_sm90.cu)
        elseif(attn_line_${name} MATCHES "^BWD90")
            set(source ${cuda_src}/bwd_sm90.cu)
            if(NOT name MATCHES "f16_d(64|128)$")
                set(source ${cuda_src}/bwd_sm90_wide.cu)
            endif()
        elseif(attn_line_${name} MATCHES "^DECODE90")
            set(source ${cuda_src}/decode_sm90.cu)
        elseif(attn_line_${name} MATCHES "^DECODE")
            set(source ${cuda_src}/decode.cu)
        elseif(attn_line_${name} MATCHES "^BWD")
            set(source ${cuda_src}/bwd.cu)
            if(attn_line_${name} MATCHES ", *BOTH,")
                set(source ${cuda_src}/bwd_one.cu)
            endif()
        endif()
        set(options -DVARIANT=${name})
    endif()
    file(CONFIGURE OUTPUT ${folder}/${name}.how CONTENT "${attn_line_${name}}\n${ATTN_NVCC} ${ARGN}\n" @ONLY)
    file(GLOB headers CONFIGURE_DEPENDS ${cuda_src}/*.cuh)
    list(APPEND headers ${cuda_src}/args.h ${cuda_src}/flaw.h ${src}/mask.h ${src}/numeric.h ${src}/philox.h
        ${src}/rotate.h ${src}/schedule.h ${PROJECT_SOURCE_DIR}/include/attn.h)
    add_custom_command(OUTPUT ${folder}/${name}.fatbin
        COMMAND ${PROJECT_SOURCE_DIR}/scripts/compile_kernel.sh ${folder}/${name} ${ATTN_NVCC} -fatbin -std=c++17 -O3
            ${options} -I ${PROJECT_SOURCE_DIR}/include -I ${src} -I ${cuda_src} ${ARGN} ${source}
        DEPENDS ${source} ${headers} ${folder}/${name}.how ${PROJECT_SOURCE_DIR}/scripts/compile_kernel.sh
        COMMENT "GPU kernel ${name}" VERBATIM)
endfunction()

# Which code a kernel has, of ATTN_CUDA_ARCHS. Only plain forward kernels have code for sm_86, which sm_89 runs too; of the others both run that
# of sm_80. Where Hopper has lines of its own the portable ones are never run there.
function(attn_archs_of name result)
    set(archs ${ATTN_CUDA_ARCHS})
    if(attn_line_${name} MATCHES "^(FWD90|BWD90|DECODE90)")
        set(archs ${attn_hopper_archs})
    elseif(NOT DEFINED attn_line_${name} OR attn_line_${name} MATCHES "^(FWD.*, *1\\)|BWD.*|DECODE.*)$")
        list(FILTER archs EXCLUDE REGEX "code=sm_86$")
    endif()
    # From sm_90 on a kernel can begin before the one before it has ended, and wait for it; decode's of 8 bits have an instruction for e4m3.
    if(attn_line_${name} MATCHES "^DECODE\\(")
        list(TRANSFORM archs REPLACE "^arch=compute_80,code=sm_90$" "arch=compute_90,code=sm_90")
        list(TRANSFORM archs REPLACE "^arch=compute_80,code=compute_80$" "arch=compute_90,code=compute_90")
    endif()
    if(attn_line_${name} MATCHES "^FWD\\(.*, *B?F16, *(64|96|128|192|256),")
        list(FILTER archs EXCLUDE REGEX "code=sm_90$")
    endif()
    list(REMOVE_ITEM archs -gencode)
    list(TRANSFORM archs PREPEND "-gencode;")
    set(${result} ${archs} PARENT_SCOPE)
endfunction()

set(attn_fatbins "")
if(attn_kernels_dir)
    foreach(name IN LISTS attn_images)
        list(APPEND attn_fatbins ${attn_kernels_dir}/${name}.fatbin)
        if(NOT ATTN_CUDA_KERNELS_DIR)
            attn_archs_of(${name} archs)
            attn_add_kernel(${attn_kernels_dir} ${name} ${archs})
        endif()
    endforeach()
    list(TRANSFORM attn_images REPLACE "(.+)" "IMAGE(\\1)\n" OUTPUT_VARIABLE list_of_images)
    string(CONCAT list_of_images ${list_of_images})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/cuda/images.def CONTENT "${list_of_images}" @ONLY)
    set_source_files_properties(${cuda_src}/images.c PROPERTIES OBJECT_DEPENDS "${attn_fatbins}"
        INCLUDE_DIRECTORIES ${PROJECT_BINARY_DIR}/cuda COMPILE_DEFINITIONS "ATTN_CUDA_IMAGES=\"${attn_kernels_dir}\"")
endif()
# Whoever embeds the images waits for this target, so that no two compile them at once.
add_custom_target(attn_kernels DEPENDS ${attn_fatbins})

if(ATTN_NVCC)
    foreach(name IN LISTS attn_tunes)
        attn_add_kernel(${attn_tune_dir} ${name} -DVARIANTS="tune.def" ${attn_tune_archs})
    endforeach()
    list(TRANSFORM attn_tunes REPLACE "(.+)" "${attn_tune_dir}/\\1.fatbin" OUTPUT_VARIABLE tune_fatbins)
    add_custom_target(attn_tune_kernels
        COMMAND ${CMAKE_COMMAND} -E copy_if_different ${cuda_src}/tune.def ${attn_tune_dir}/tune.def DEPENDS ${tune_fatbins})
else()
    add_custom_target(attn_tune_kernels
        COMMAND ${CMAKE_COMMAND} -E echo "tune-kernels: nvcc is not found" COMMAND ${CMAKE_COMMAND} -E false VERBATIM)
endif()
