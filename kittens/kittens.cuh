// The tile library, in one include.
#pragma once

#include "host/launch.h"
#include "ops/group/group.cuh"
#include "ops/shared_allocator.cuh"
#include "ops/thread/semaphore.cuh"
#include "ops/thread/tma.cuh"
#include "ops/warp.cuh"
#include "types/global/gl.cuh"
#include "types/global/ragged.cuh"
#include "types/register/rt.cuh"
#include "types/register/rv.cuh"
#include "types/shared/st.cuh"
#include "types/shared/sv.cuh"
