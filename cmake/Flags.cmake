# Compiler flags, and how the libraries are made: C++20, hidden symbols, no RUNPATH, no path of the
# building machine in what ships (messages, line information), line information for profilers
# where THUNDERKITTENS_LINEINFO asks for it: it is three quarters of the size.
set(CMAKE_SKIP_RPATH ON)

set(TK_ARCHS_TEXT "")
if(THUNDERKITTENS_CUDA)
  string(REPLACE ";" "," TK_ARCHS_TEXT "${THUNDERKITTENS_CUDA_ARCHS}")
endif()

# What to cut from paths: <folder>=<what stands for it>. The longest first, because one may lie
# within another.
cmake_path(GET TORCH_DIR PARENT_PATH site_packages)
set(TK_PATHS "${PROJECT_BINARY_DIR}=build" "${PROJECT_SOURCE_DIR}=." "${TORCH_DIR}=torch"
             "${site_packages}=python")
if(TK_CUDA_HOME)
  list(INSERT TK_PATHS 2 "${TK_CUDA_HOME}=cuda" "${TK_CUDA_LINK}=cuda")
endif()
set(TK_PREFIX_MAPS)
foreach(path IN LISTS TK_PATHS)
  # The last that matches wins.
  list(PREPEND TK_PREFIX_MAPS "-ffile-prefix-map=${path}")
endforeach()

# -O3 takes gcc a third longer, for larger code.
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

set(TK_WARNINGS -Wall -Wextra -Wno-missing-field-initializers)
if(THUNDERKITTENS_WERROR)
  list(APPEND TK_WARNINGS -Werror)
endif()

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

# tools/compile_kernel.py runs nvcc, records what ptxas reports of each kernel, and cuts paths from
# the line information (nvcc writes absolute ones there and has no option against it); it reads the
# size of each kernel's code too, both in an uncompressed image, which it then compresses.
set(TK_CUDA_LAUNCHER ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/compile_kernel.py)
if(THUNDERKITTENS_COMPRESS AND CMAKE_OBJCOPY)
  list(APPEND TK_CUDA_LAUNCHER --compress ${CMAKE_OBJCOPY})
endif()
foreach(path IN LISTS TK_PATHS)
  string(REGEX REPLACE "=[^=]*$" "" folder ${path})
  list(APPEND TK_CUDA_LAUNCHER --cut ${folder})
endforeach()
list(APPEND TK_CUDA_LAUNCHER --)
if(CCACHE)
  list(APPEND TK_CUDA_LAUNCHER ${CCACHE})
endif()
# nvcc's -O is that of the host's compiler: it hands no level on to cicc and ptxas, which optimise
# fully without one, and the machine code of kernels is the same. The host code of a kernel's file
# makes tensor maps and launches; gcc takes some 5 CPU-seconds for it at -O3 and 2.7 at -O1.
string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
list(TRANSFORM TK_PREFIX_MAPS PREPEND "-Xcompiler=" OUTPUT_VARIABLE TK_CUDA_FLAGS)
list(APPEND TK_CUDA_FLAGS -Xptxas=-v --compress-mode=none)
if(THUNDERKITTENS_LINEINFO)
  list(APPEND TK_CUDA_FLAGS -lineinfo)
endif()
if(THUNDERKITTENS_WERROR)
  list(APPEND TK_CUDA_FLAGS -Werror=all-warnings)
endif()

# The names of hidden symbols are a twentieth of the package, and only debuggers and profilers read
# them. pip's wheel is stripped as it is installed; linked without them, a development build is of
# the same size. Other types of build, such as RelWithDebInfo, and a sanitizer's keep them.
if(CMAKE_BUILD_TYPE MATCHES "^(Release|MinSizeRel)$" AND NOT THUNDERKITTENS_SANITIZE)
  set(TK_LINK_FLAGS -Wl,--strip-all)
endif()

# Flags of a library of host code.
function(tk_target_flags target)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON
               LINKER_LANGUAGE CXX
               CUDA_RUNTIME_LIBRARY None)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE THUNDERKITTENS_ARCHS="${TK_ARCHS_TEXT}")
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${TK_WARNINGS}>
                                           $<$<COMPILE_LANGUAGE:CXX>:${TK_PREFIX_MAPS}>)
  target_link_options(${target} PRIVATE ${TK_LINK_FLAGS})
endfunction()

# A library of ops, on torch's stable ABI of 2.11 whatever torch it is built with. It must name
# torch's libraries as needed, because torch loads them without making their symbols global.
function(tk_add_op_library target)
  add_library(${target} MODULE ${ARGN})
  tk_target_flags(${target})
  set_target_properties(${target} PROPERTIES PREFIX "")
  target_include_directories(${target} SYSTEM PRIVATE ${TORCH_DIR}/include)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
  target_link_options(${target} PRIVATE -Wl,--no-as-needed -Wl,--no-undefined
                      -Wl,--allow-shlib-undefined)
endfunction()

# A library on torch's C++ interface, which changes from version to version. Where the first source
# does not compile with this torch, there is none, and a message says so.
function(tk_add_autograd_library target first)
  set(includes ${PROJECT_SOURCE_DIR} ${TORCH_DIR}/include)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  try_compile(TK_TORCH_HAS_NODES SOURCES ${PROJECT_SOURCE_DIR}/${first}
              CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${includes}" CXX_STANDARD 20)
  if(NOT TK_TORCH_HAS_NODES)
    message(STATUS "no autograd nodes for torch ${TORCH_VERSION}: gradients are recorded in Python")
    return()
  endif()
  add_library(${target} MODULE ${first} ${ARGN})
  tk_target_flags(${target})
  # As one unit: torch's headers take most of the time.
  set_target_properties(${target} PROPERTIES PREFIX "" UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  target_include_directories(${target} SYSTEM PRIVATE ${TORCH_DIR}/include)
  target_link_options(${target} PRIVATE -Wl,--no-as-needed -Wl,--no-undefined
                      -Wl,--allow-shlib-undefined)
  target_link_libraries(${target} PRIVATE ${TORCH_DIR}/lib/libtorch_cpu.so
                                          ${TORCH_DIR}/lib/libc10.so)
endfunction()

# The path to link libtorch_cuda by. A CPU-only torch has none: an empty library of that name stands
# in, since the real one is only looked up when _cuda.so is loaded.
function(tk_libtorch_cuda result)
  set(library ${TORCH_DIR}/lib/libtorch_cuda.so)
  if(NOT EXISTS ${library})
    set(source ${PROJECT_BINARY_DIR}/libtorch_cuda_stub.c)
    file(WRITE ${source} "void aoti_torch_get_current_cuda_stream(void) {}\n")
    set(library ${PROJECT_BINARY_DIR}/libtorch_cuda.so)
    execute_process(
      COMMAND ${CMAKE_CXX_COMPILER} -x c -shared -fPIC -Wl,-soname,libtorch_cuda.so ${source} -o
              ${library} COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(${result} ${library} PARENT_SCOPE)
endfunction()
