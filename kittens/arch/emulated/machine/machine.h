// The machine that runs emulated kernels: the definitions of what calls.h declares. Every file here
// includes the one below it; this one includes them all.
#pragma once

#include "accesses.h"
#include "matrices.h"
#include "run.h"
