// The emulator, compiled once for all sections of the unit tests.
#include "arch/emulated/machine/machine.h"
