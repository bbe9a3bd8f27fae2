# What the package holds besides its libraries: the build record, the table of kernels, the tile
# library's headers.
set(package ${PROJECT_NAME})

# ---- the build record ----
find_package(Git QUIET)
set(commit "${THUNDERKITTENS_COMMIT}")
if(Git_FOUND AND NOT commit)
  execute_process(
    COMMAND ${GIT_EXECUTABLE} describe --always --dirty --abbrev=40 --exclude=*
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE commit
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(log ${PROJECT_SOURCE_DIR}/.git/logs/HEAD)
  if(EXISTS ${log})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${log})
  endif()
endif()
if(NOT commit)
  set(commit unknown)
endif()

function(tk_json_list result)
  list(TRANSFORM ARGN REPLACE "(.+)" "\"\\1\"")
  list(JOIN ARGN ", " text)
  set(${result} "[${text}]" PARENT_SCOPE)
endfunction()
set(archs)
set(nvcc_version null)
set(nvcc_flags null)
if(THUNDERKITTENS_CUDA)
  set(archs ${THUNDERKITTENS_CUDA_ARCHS})
  set(nvcc_version "\"${CMAKE_CUDA_COMPILER_VERSION}\"")
  set(flags ${TK_CUDA_FLAGS})
  list(FILTER flags EXCLUDE REGEX "prefix-map")
  list(JOIN flags " " flags)
  set(nvcc_flags "\"-std=c++20 ${CMAKE_CUDA_FLAGS_RELEASE} ${flags}\"")
endif()
tk_json_list(archs_json ${archs})
tk_json_list(families_json ${TK_FAMILIES})
list(JOIN TK_WARNINGS " " flags)
file(
  WRITE ${PROJECT_BINARY_DIR}/_build.json
  "{
  \"version\": \"${TK_VERSION}\",
  \"commit\": \"${commit}\",
  \"torch_minimum\": \"2.11\",
  \"torch_headers\": \"${TORCH_VERSION}\",
  \"cuda_archs\": ${archs_json},
  \"families\": ${families_json},
  \"nvcc\": ${nvcc_version},
  \"nvcc_flags\": ${nvcc_flags},
  \"cxx\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"cxx_flags\": \"-std=c++20 ${CMAKE_CXX_FLAGS_RELEASE} ${flags}\",
  \"python\": \"${Python_VERSION}\",
  \"platform\": \"${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}\",
  \"build_type\": \"${CMAKE_BUILD_TYPE}\"
}
")

# ---- the table of kernels: registers, spills, stack, shared memory and code size of each ----
get_property(kernel_targets GLOBAL PROPERTY TK_KERNEL_TARGETS)
set(objects)
foreach(target IN LISTS kernel_targets)
  list(APPEND objects $<TARGET_OBJECTS:${target}>)
endforeach()
add_custom_command(
  OUTPUT ${PROJECT_BINARY_DIR}/kernels.json
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/kernel_table.py --output
          ${PROJECT_BINARY_DIR}/kernels.json ${objects}
  DEPENDS ${objects} ${PROJECT_SOURCE_DIR}/tools/kernel_table.py
  COMMAND_EXPAND_LISTS VERBATIM
  COMMENT "Table of kernels")
add_custom_target(kernel_table ALL DEPENDS ${PROJECT_BINARY_DIR}/kernels.json)

# ---- installation ----
install(TARGETS ${libraries} LIBRARY DESTINATION ${package})
install(FILES ${PROJECT_BINARY_DIR}/_build.json ${PROJECT_BINARY_DIR}/kernels.json
        DESTINATION ${package})
install(DIRECTORY kittens DESTINATION ${package}/include FILES_MATCHING PATTERN "*.cuh"
        PATTERN "*.h")
install(FILES cmake/kittens/kittensConfig.cmake cmake/kittens/kittensConfigVersion.cmake
        DESTINATION ${package}/share/cmake/kittens)
if(NOT SKBUILD)
  # scikit-build-core packs the Python sources itself.
  install(DIRECTORY python/${package}/ DESTINATION ${package} PATTERN "__pycache__" EXCLUDE)
endif()
