# The modules of pybind11, for the Python of this build and, in a release, for those that
# THUNDERKITTENS_PYTHONS names, of which nothing but the headers is needed (tools/release.py).

# Adds the module <name> and, for each further Python, a module <name>_<tag> of the same sources, of
# which only those given as files are compiled anew. Sets <name>_MODULES to all of them. Those of a
# further Python are installed by `cmake --install ... --component <tag>` alone.
function(tk_add_python_modules name)
  pybind11_add_module(${name} MODULE NO_EXTRAS ${ARGN})
  tk_target_flags(${name})
  set(modules ${name})
  foreach(python IN LISTS THUNDERKITTENS_PYTHONS)
    execute_process(
      COMMAND ${python} -c
              "import sys, sysconfig
print(*('cp%d%d' % sys.version_info[:2], sysconfig.get_config_var('EXT_SUFFIX'), \
sysconfig.get_path('include')), sep=';')"
      OUTPUT_VARIABLE facts
      OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    list(GET facts 0 tag)
    list(GET facts 1 suffix)
    list(GET facts 2 headers)
    set(module ${name}_${tag})
    add_library(${module} MODULE ${ARGN})
    tk_target_flags(${module})
    set_target_properties(
      ${module} PROPERTIES PREFIX "" OUTPUT_NAME ${name} SUFFIX ${suffix}
                           LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${tag})
    target_include_directories(${module} SYSTEM PRIVATE ${headers})
    target_link_libraries(${module} PRIVATE pybind11::headers)
    install(TARGETS ${module} LIBRARY DESTINATION . COMPONENT ${tag} EXCLUDE_FROM_ALL)
    list(APPEND modules ${module})
  endforeach()
  set(${name}_MODULES ${modules} PARENT_SCOPE)
endfunction()
