// What the module's other files add to it.
#pragma once

#include <pybind11/pybind11.h>

// The tile library's layouts and the ops' tile orders, as NumPy arrays.
void bind_layouts(pybind11::module_& m);
