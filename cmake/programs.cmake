# The command line attn, and for work on the library itself: the test program, the examples, the fuzz targets.

# tools/attn.c holds main; the rest of tools/ is also linked into the tests.
file(GLOB tool_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/*.c)
set(tool_parts ${tool_sources})
list(FILTER tool_parts EXCLUDE REGEX "/attn\\.c$")

add_executable(attn_tool ${tool_sources})
set_target_properties(attn_tool PROPERTIES OUTPUT_NAME attn)
target_include_directories(attn_tool PRIVATE ${PROJECT_SOURCE_DIR}/tools ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(attn_tool PRIVATE attn_static attn_flags m)

if(ATTN_TESTS OR ATTN_FUZZ)
    attn_library_objects(attn_faulty ATTN_FAULTS=1)
    add_library(attn_faulty STATIC EXCLUDE_FROM_ALL ${attn_faulty_objects} ${tool_parts})
    set_target_properties(attn_faulty PROPERTIES LINKER_LANGUAGE C)
    target_compile_definitions(attn_faulty PUBLIC ATTN_FAULTS=1)
    target_include_directories(attn_faulty PUBLIC
        ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tools)
    target_link_libraries(attn_faulty PUBLIC attn_flags m Threads::Threads ${CMAKE_DL_LIBS})
endif()

if(ATTN_TESTS)
    file(GLOB test_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/*.c)
    add_executable(attn-tests ${test_sources})
    target_link_libraries(attn-tests PRIVATE attn_faulty)
    target_compile_definitions(attn-tests PRIVATE ${attn_isa_definitions})

    file(GLOB example_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*.c)
    foreach(source IN LISTS example_sources)
        get_filename_component(name ${source} NAME_WE)
        add_executable(example-${name} ${source})
        target_link_libraries(example-${name} PRIVATE attn_shared attn_flags m)
    endforeach()
endif()

if(ATTN_FUZZ)
    add_custom_target(fuzz-targets)
    file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*.c)
    foreach(source IN LISTS fuzz_sources)
        get_filename_component(name ${source} NAME_WE)
        add_executable(fuzz-${name} ${source} ${PROJECT_SOURCE_DIR}/tests/build.c)
        target_link_libraries(fuzz-${name} PRIVATE attn_faulty)
        target_link_options(fuzz-${name} PRIVATE -fsanitize=fuzzer)
        add_dependencies(fuzz-targets fuzz-${name})
    endforeach()
endif()
