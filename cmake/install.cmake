# What cmake --install lays down: header, both libraries, the command line, its man page, pkg-config and a CMake package.
include(CMakePackageConfigHelpers)

install(TARGETS attn_shared attn_static EXPORT attn-targets)
install(TARGETS attn_tool)
install(FILES include/attn.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES docs/attn.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)

# The prefix is found from where the file lies, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/attn.pc.in attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/attn)
install(EXPORT attn-targets NAMESPACE attn:: DESTINATION ${package_dir})
configure_package_config_file(cmake/attn-config.cmake.in attn-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(attn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/attn-config.cmake ${PROJECT_BINARY_DIR}/attn-config-version.cmake
    DESTINATION ${package_dir})
