/* What the CUDA library holds. C interface: fastcaps/libraries.py reads it, on machines without a GPU too. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* The toolkit's version, e.g. "13.0.88". Comma-separated: what the kernels are compiled for, as CMake writes it
   ("90-real" is code for 9.0, "90" code and PTX). introspection.cu has what concerns a call. */
const char* fastcaps_cuda_toolkit(void);
const char* fastcaps_cuda_architectures(void);

#ifdef __cplusplus
}
#endif
