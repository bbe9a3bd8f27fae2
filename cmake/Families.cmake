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

# The kernels of an architecture family are those of the files whose names hold _sm<number>, that
# of the least GPU that runs them, or no such word, which are of sm90 (tools/instances.py). What is
# made of them, THUNDERKITTENS_CUDA_ARCHS lists:
#
#   90a       native kernels, for one compute capability: machine code of the files of sm90
#   80        portable kernels, the files of sm80: machine code of 8.0, which 8.6 and 8.9 run, and
#             PTX that the driver compiles for every later GPU
#   120-real  machine code of the same files for 12.0, which spares the driver that
#   80-virtual  the PTX alone
#
# Portable files of one name hold all that is listed for them, which the driver picks from. A file
# of sm89 is made for what is listed from 89 on. The compiler runs once for a file, for PTX of the
# least architecture that is listed, and ptxas for each kind of machine code. Of several entries of
# one major version the least serves the others too: 89 beside 80 is for files of sm89 alone.
function(tk_add_all_kernels library)
  set(portable ${THUNDERKITTENS_CUDA_ARCHS})
  list(FILTER portable INCLUDE REGEX "^[0-9]+(-real|-virtual)?$")
  set(native ${THUNDERKITTENS_CUDA_ARCHS})
  list(FILTER native INCLUDE REGEX "^[0-9]+[a-z]$")
  foreach(arch IN LISTS THUNDERKITTENS_CUDA_ARCHS)
    if(NOT arch IN_LIST portable AND NOT arch IN_LIST native)
      message(FATAL_ERROR "THUNDERKITTENS_CUDA_ARCHS names '${arch}'; an architecture is a number, "
                          "as 80, 120-real or 80-virtual, or one with a letter, as 90a")
    endif()
  endforeach()
  if(NOT 90a IN_LIST native)
    message(FATAL_ERROR "THUNDERKITTENS_CUDA_ARCHS must name 90a: most ops have no other kernels")
  endif()
  foreach(arch IN LISTS native)
    string(REGEX MATCH "^[0-9]+" number ${arch})
    tk_add_kernels(${library} ${number} "arch=compute_${arch},code=[sm_${arch}]")
  endforeach()
  list(SORT portable COMPARE NATURAL)
  foreach(number 80 89)
    tk_portable_code(${number} code ${portable})
    if(code)
      tk_add_kernels(${library} ${number} "${code}")
    endif()
  endforeach()
endfunction()

# What nvcc makes of the files of an architecture family, of entries in ascending order; "" if none
# of them is for these files.
function(tk_portable_code number result)
  set(base)
  set(codes)
  set(majors)
  foreach(arch IN LISTS ARGN)
    string(REGEX MATCH "^[0-9]+" least ${arch})
    if(least LESS number)
      continue()
    endif()
    if(NOT base)
      set(base ${least})
    endif()
    math(EXPR major "${least} / 10")
    if(NOT arch MATCHES "-virtual$" AND NOT major IN_LIST majors)
      list(APPEND majors ${major})
      list(APPEND codes sm_${least})
    endif()
    if(NOT arch MATCHES "-real$")
      list(APPEND codes compute_${base})
    endif()
  endforeach()
  set(text "")
  if(codes)
    list(REMOVE_DUPLICATES codes)
    list(JOIN codes "," codes)
    set(text "arch=compute_${base},code=[${codes}]")
  endif()
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

# Adds the kernels of an architecture family to a library; `code` is what nvcc makes of them.
function(tk_add_kernels library number code)
  set(sources ${TK_KERNEL_SOURCES})
  if(number EQUAL 90)
    list(FILTER sources EXCLUDE REGEX "_sm(8|1)[0-9]+[^/]*\\.cu$")
  else()
    list(FILTER sources INCLUDE REGEX "_sm${number}[^/]*\\.cu$")
  endif()
  if(NOT sources)
    return()
  endif()
  set(target kernels_sm${number})
  add_library(${target} OBJECT ${sources})
  set_target_properties(
    ${target} PROPERTIES CUDA_ARCHITECTURES OFF CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                         CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                         POSITION_INDEPENDENT_CODE ON CUDA_COMPILER_LAUNCHER "${TK_CUDA_LAUNCHER}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE THUNDERKITTENS_ARCHS="${TK_ARCHS_TEXT}")
  target_compile_options(${target} PRIVATE "--generate-code=${code}" ${TK_CUDA_FLAGS})
  target_sources(${library} PRIVATE $<TARGET_OBJECTS:${target}>)
  set_property(GLOBAL APPEND PROPERTY TK_KERNEL_TARGETS ${target})
endfunction()
