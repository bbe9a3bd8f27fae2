# find_package(kittens): the tile library's headers, for kernels of one's own. In a clone and in an
# installed package alike; `python -m thunderkittens cmake-dir` prints this folder.
#
#   kittens::kittens    include folder and C++20; with CUDA as a language, what nvcc needs as well
#   kittens::emulator   the same for a C++ compiler, which makes programs that run on the CPU
#   kittens_add_python_module(<name> [EMULATED] <source>...)
#                       a Python module of sources with KITTENS_PYTHON_MODULE (kittens/python.cuh);
#                       find_package(Python COMPONENTS Interpreter Development.Module) comes before
#
# KITTENS_CUDA_INCLUDE names the folder of CUDA 13's headers, which the emulator needs (no nvcc),
# where the search does not find it.
cmake_minimum_required(VERSION 3.25)

# The folder with kittens/kittens.cuh: of an installed package, or of a clone.
foreach(folder ../../../include ../..)
  cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY ${CMAKE_CURRENT_LIST_DIR} NORMALIZE)
  if(EXISTS ${folder}/kittens/kittens.cuh)
    set(kittens_INCLUDE_DIR ${folder})
    break()
  endif()
endforeach()
if(NOT kittens_INCLUDE_DIR)
  set(kittens_FOUND FALSE)
  set(kittens_NOT_FOUND_MESSAGE "kittens/kittens.cuh is missing; reinstall thunderkittens")
  return()
endif()

function(kittens_find_cuda_headers result)
  set(folders ${KITTENS_CUDA_INCLUDE} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}
              "$ENV{CUDA_HOME}/include")
  if(Python_EXECUTABLE)
    # Those that pip has installed.
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u
spec = u.find_spec('nvidia')
print(*(spec.submodule_search_locations if spec else []), sep=';')"
      OUTPUT_VARIABLE roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    foreach(root IN LISTS roots)
      file(GLOB of_pip ${root}/cu13*/include)
      list(APPEND folders ${of_pip})
    endforeach()
  endif()
  set(toolkit cuda)  # the system's
  foreach(folder IN LISTS folders ITEMS /usr/local/${toolkit}/include)
    if(EXISTS ${folder}/cuda_fp8.h AND EXISTS ${folder}/crt/host_config.h
       AND EXISTS ${folder}/nv/target)
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

if(NOT TARGET kittens::kittens)
  add_library(kittens::kittens INTERFACE IMPORTED)
  # nvcc reads headers of a system folder twice, whatever their #pragma once says.
  set_target_properties(kittens::kittens PROPERTIES IMPORTED_NO_SYSTEM ON)
  target_include_directories(kittens::kittens INTERFACE ${kittens_INCLUDE_DIR}
                                                        ${kittens_INCLUDE_DIR}/kittens)
  target_compile_features(kittens::kittens INTERFACE cxx_std_20)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(CUDA IN_LIST languages)
    # A feature would say it, cuda_std_20, which CMake 3.25 does not know of this nvcc.
    set(unset $<NOT:$<BOOL:$<TARGET_PROPERTY:CUDA_STANDARD>>>)
    target_compile_options(
      kittens::kittens INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
                                 $<$<AND:$<COMPILE_LANGUAGE:CUDA>,${unset}>:-std=c++20>)
  endif()
endif()

kittens_find_cuda_headers(kittens_cuda_headers)
if(NOT TARGET kittens::emulator AND kittens_cuda_headers)
  find_package(Threads REQUIRED)
  add_library(kittens::emulator INTERFACE IMPORTED)
  # As system headers: what a compiler warns of in them is nobody's here to change.
  target_include_directories(kittens::emulator SYSTEM INTERFACE ${kittens_cuda_headers})
  target_include_directories(kittens::emulator INTERFACE ${kittens_INCLUDE_DIR}
                                                         ${kittens_INCLUDE_DIR}/kittens)
  target_compile_features(kittens::emulator INTERFACE cxx_std_20)
  # Kernels see the same registers as words and as numbers.
  target_compile_options(kittens::emulator INTERFACE -fno-strict-aliasing -Wno-unknown-pragmas
                                                     -Wno-psabi)
  target_link_libraries(kittens::emulator INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
endif()

function(kittens_add_python_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg EMULATED "" "")
  if(NOT Python_INCLUDE_DIRS)
    message(FATAL_ERROR "kittens_add_python_module: call find_package(Python COMPONENTS "
                        "Interpreter Development.Module) before find_package(kittens)")
  endif()
  set(sources ${arg_UNPARSED_ARGUMENTS})
  if(arg_EMULATED)
    if(NOT TARGET kittens::emulator)
      message(FATAL_ERROR "kittens_add_python_module: the emulator needs CUDA 13's headers: pip "
                          "install 'cuda-toolkit[cccl,crt,cudart]==13.0.*', or set "
                          "KITTENS_CUDA_INCLUDE")
    endif()
    # A file may be CUDA in one target and C++ in another, which CMake cannot say of the file.
    set(wrappers)
    foreach(source IN LISTS sources)
      cmake_path(ABSOLUTE_PATH source NORMALIZE)
      string(MD5 key ${source})
      set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${name}_${key}.cpp)
      file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${source}\"\n")
      list(APPEND wrappers ${wrapper})
    endforeach()
    set(sources ${wrappers})
  endif()
  add_library(${name} MODULE ${sources})
  target_link_libraries(
    ${name} PRIVATE $<IF:$<BOOL:${arg_EMULATED}>,kittens::emulator,kittens::kittens>)
  target_include_directories(${name} SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
  # The limited API: one library for every Python from 3.10 on, and for every torch.
  target_compile_definitions(${name} PRIVATE TORCH_EXTENSION_NAME=${name}
                                             Py_LIMITED_API=0x030a0000)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".abi3.so" CXX_VISIBILITY_PRESET hidden
                                           CUDA_VISIBILITY_PRESET hidden)
endfunction()
