# Finds torch and the CUDA compiler, without importing torch and without find_package(Torch), which
# rewrites the CUDA flags and architectures. Sets
#
#   TORCH_DIR, TORCH_VERSION      the torch package
#   CMAKE_CUDA_COMPILER           nvcc: what CUDACXX or THUNDERKITTENS_CUDA_HOME names, else pip's
#   TK_CUDA_INCLUDE, TK_CUDART    the toolkit's headers, and its libcudart.so.13

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

# The folder of an installed Python package, or "".
function(tk_python_package name result)
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.util as u
spec = u.find_spec('${name}')
print(list(spec.submodule_search_locations)[0] if spec else '')"
    OUTPUT_VARIABLE location
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${location}" PARENT_SCOPE)
endfunction()

tk_python_package(torch TORCH_DIR)
if(NOT TORCH_DIR)
  message(
    FATAL_ERROR
      "torch is not installed for ${Python_EXECUTABLE}. 'pip install .' brings it by itself; with "
      "--no-build-isolation, or with cmake alone, run first: pip install 'torch>=2.11'")
endif()
file(STRINGS ${TORCH_DIR}/version.py version_line REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+[^'\"]*" TORCH_VERSION "${version_line}")
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${TORCH_VERSION} is too old; run: pip install 'torch>=2.11'")
endif()

# nvcc of a toolkit's folder.
function(tk_choose_nvcc result)
  set(home "${THUNDERKITTENS_CUDA_HOME}")
  if(home)
    if(NOT EXISTS "${home}/bin/nvcc")
      message(FATAL_ERROR "THUNDERKITTENS_CUDA_HOME is ${home}, which has no bin/nvcc")
    endif()
    set(${result} "${home}/bin/nvcc" PARENT_SCOPE)
    return()
  endif()
  if(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(${result} "$ENV{CUDACXX}" PARENT_SCOPE)
    return()
  endif()
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.util as u, pathlib
spec = u.find_spec('nvidia')
roots = [pathlib.Path(r) for r in spec.submodule_search_locations] if spec else []
print(next((str(p) for r in roots for p in sorted(r.glob('cu13*/bin/nvcc'))), ''))"
    OUTPUT_VARIABLE nvcc
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT nvcc)
    message(
      FATAL_ERROR
        "No nvcc: 'pip install .' brings it by itself. With --no-build-isolation, or with cmake "
        "alone, either run pip install 'cuda-toolkit[nvcc,cccl,crt,cudart,nvvm]==13.0.*', or name "
        "a CUDA 13 toolkit with THUNDERKITTENS_CUDA_HOME, or build without CUDA kernels with "
        "THUNDERKITTENS_CUDA=OFF")
  endif()
  set(${result} "${nvcc}" PARENT_SCOPE)
endfunction()

# A macro: enable_language() is to be called at file scope. The libcudart is looked up beside nvcc
# by its file name: pip's layout has lib/ without the unversioned link that
# find_package(CUDAToolkit) searches for, which would then take the system's.
macro(tk_enable_cuda)
  if(NOT CMAKE_CUDA_COMPILER)
    tk_choose_nvcc(nvcc)
    set(CMAKE_CUDA_COMPILER ${nvcc} CACHE FILEPATH "The CUDA compiler")
  endif()
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # those of each family of kernels, see Families.cmake
  enable_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.")
    message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}, not CUDA 13")
  endif()
  set(TK_CUDA_INCLUDE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH nvcc_folder)
  cmake_path(GET nvcc_folder PARENT_PATH TK_CUDA_LINK)
  file(REAL_PATH ${TK_CUDA_LINK} TK_CUDA_HOME)
  file(GLOB candidates ${TK_CUDA_HOME}/lib64/libcudart.so.13 ${TK_CUDA_HOME}/lib/libcudart.so.13
       ${TK_CUDA_HOME}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux/lib/libcudart.so.13)
  list(GET candidates 0 TK_CUDART)
  if(NOT TK_CUDART)
    message(FATAL_ERROR "no libcudart.so.13 beside ${CMAKE_CUDA_COMPILER}")
  endif()
  message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION}: ${CMAKE_CUDA_COMPILER}; ${TK_CUDART}")
endmacro()

# The folder of CUDA's headers, which the emulator needs without a CUDA compiler: of the toolkit that
# is used or named, else pip's, else the system's. Empty when there is none.
function(tk_cuda_headers result)
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.util as u, pathlib
spec = u.find_spec('nvidia')
roots = [pathlib.Path(r) for r in spec.submodule_search_locations] if spec else []
print(next((str(p.parents[1]) for r in roots for p in sorted(r.glob('cu13*/include/crt/host_config.h'))), ''))"
    OUTPUT_VARIABLE pip_headers
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  foreach(folder ${TK_CUDA_INCLUDE} "${THUNDERKITTENS_CUDA_HOME}/include" ${pip_headers}
                 "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
    if(EXISTS ${folder}/cuda_fp8.h AND EXISTS ${folder}/crt/host_config.h
       AND EXISTS ${folder}/nv/target)
      message(STATUS "the emulator's CUDA headers: ${folder}")
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(WARNING "no CUDA headers were found: the package will have no emulator. Run "
                  "pip install 'cuda-toolkit[cccl,crt,cudart]==13.0.*'")
  set(${result} "" PARENT_SCOPE)
endfunction()
