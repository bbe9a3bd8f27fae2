// The kernel templates and what they are built from, in one include: the user writes what a load, a
// computation and a finish are, the template runs them as a persistent, warp-specialised kernel.
#pragma once

#include "kittens.cuh"
#include "pipeline/lcf.cuh"
#include "pipeline/lcsf.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/schedule.h"
