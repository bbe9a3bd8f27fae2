// The emulator's machine, compiled once for all kernels: their files know its calls alone.
#include "kittens/arch/emulated/machine/machine.h"
