# The families of ops: every folder of csrc/ that has a choose.cpp, itself or in a room (a folder of
# the family), less those that THUNDERKITTENS_OPS leaves out. Sets
#
#   TK_FAMILIES         their names
#   TK_OP_SOURCES       the other csrc/<family>/**/*.cpp: host code with torch's headers
#   TK_CHOOSE_SOURCES   csrc/<family>/**/choose*.cpp: host code without
#   TK_KERNEL_SOURCES   what instantiates the kernels, written from csrc/<family>/instances.txt
#   TK_EMULATED_SOURCES csrc/<family>/**/emulated*.cpp, and the same instances for the emulator
set(TK_FAMILIES)
set(TK_OP_SOURCES)
set(TK_CHOOSE_SOURCES)
set(TK_KERNEL_SOURCES)
set(TK_EMULATED_SOURCES)
file(GLOB families CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} csrc/*/choose.cpp
     csrc/*/*/choose.cpp)
list(TRANSFORM families REPLACE "^csrc/([^/]+)/.*" "\\1")
list(REMOVE_DUPLICATES families)

# The instances that csrc/<family>/instances.txt lists, written as <stem>.cu and <stem>.cpp into a
# folder of the build; a changed list is read again at the next build. Sets `result` to the files
# without their suffix.
set(TK_INSTANCES ${PROJECT_SOURCE_DIR}/tools/instances.py)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${TK_INSTANCES})
function(tk_write_instances family result)
  set(list ${PROJECT_SOURCE_DIR}/csrc/${family}/instances.txt)
  set(folder ${PROJECT_BINARY_DIR}/instances/${family})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${TK_INSTANCES} ${list} ${folder} --suffix .cu --suffix .cpp
    OUTPUT_VARIABLE stems OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" stems "${stems}")
  list(TRANSFORM stems PREPEND ${folder}/)
  set(${result} ${stems} PARENT_SCOPE)
endfunction()

foreach(family IN LISTS families)
  if(THUNDERKITTENS_OPS AND NOT family IN_LIST THUNDERKITTENS_OPS)
    continue()
  endif()
  file(GLOB_RECURSE op_sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
       csrc/${family}/*.cpp)
  set(family_choose_sources ${op_sources})
  list(FILTER family_choose_sources INCLUDE REGEX "/choose[^/]*$")
  set(emulated_sources ${op_sources})
  list(FILTER emulated_sources INCLUDE REGEX "/emulated[^/]*$")
  list(FILTER op_sources EXCLUDE REGEX "/(choose|emulated)[^/]*$")
  tk_write_instances(${family} instances)
  list(TRANSFORM instances APPEND .cu OUTPUT_VARIABLE kernel_sources)
  if(emulated_sources)
    list(TRANSFORM instances APPEND .cpp)
    list(APPEND TK_EMULATED_SOURCES ${emulated_sources} ${instances})
  endif()
  list(APPEND TK_FAMILIES ${family})
  list(APPEND TK_OP_SOURCES ${op_sources})
  list(APPEND TK_CHOOSE_SOURCES ${family_choose_sources})
  list(APPEND TK_KERNEL_SOURCES ${kernel_sources})
endforeach()
foreach(family IN LISTS THUNDERKITTENS_OPS)
  if(NOT family IN_LIST TK_FAMILIES)
    message(FATAL_ERROR "THUNDERKITTENS_OPS names '${family}'; the families are: ${TK_FAMILIES}")
  endif()
endforeach()
message(STATUS "families: ${TK_FAMILIES}")

# An object library with the kernels of one architecture. Instances whose file name holds
# _sm<number> are of that architecture, those without of sm90.
function(tk_add_kernels target arch)
  string(REGEX MATCH "^[0-9]+" number ${arch})
  set(sources ${TK_KERNEL_SOURCES})
  if(number EQUAL 90)
    list(FILTER sources EXCLUDE REGEX "_sm(8|1)[0-9]+[^/]*\\.cu$")
  else()
    list(FILTER sources INCLUDE REGEX "_sm${number}[^/]*\\.cu$")
  endif()
  if(NOT sources)
    return()
  endif()
  add_library(${target} OBJECT ${sources})
  set_target_properties(
    ${target} PROPERTIES CUDA_ARCHITECTURES ${arch}-real CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                         CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                         POSITION_INDEPENDENT_CODE ON CUDA_COMPILER_LAUNCHER "${TK_CUDA_LAUNCHER}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE THUNDERKITTENS_ARCHS="${TK_ARCHS_TEXT}")
  target_compile_options(${target} PRIVATE ${TK_CUDA_FLAGS})
  set_property(GLOBAL APPEND PROPERTY TK_KERNEL_TARGETS ${target})
endfunction()
