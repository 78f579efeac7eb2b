// fastcaps._C: what this build holds and what it chose on this machine. It knows no torch and runs no routing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "build_info.h"
#include "cpu/capability.h"

namespace py = pybind11;

namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = text.find(',', begin);
    if (end == std::string::npos) end = text.size();
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FASTCAPS_VERSION;
  info["compiler"] = FASTCAPS_COMPILER;
  info["torch_version"] = FASTCAPS_TORCH_VERSION;
  info["stable_abi_target"] = FASTCAPS_STABLE_ABI;
  info["flags"] = FASTCAPS_FLAGS;
  info["level_flags"] = std::map<std::string, std::string>{FASTCAPS_LEVEL_FLAGS};
  info["cuda"] = py::none();
  info["cuda_why_not"] = FASTCAPS_CUDA_WHY_NOT;
  if (std::string(FASTCAPS_CUDA_TOOLKIT) != "") {
    py::dict cuda;
    cuda["toolkit"] = FASTCAPS_CUDA_TOOLKIT;
    cuda["architectures"] = split(FASTCAPS_CUDA_ARCHITECTURES);
    cuda["flags"] = FASTCAPS_CUDA_FLAGS;
    info["cuda"] = cuda;
  }
  return info;
}

std::vector<std::string> capabilities_built() { return split(fastcaps_capabilities_built()); }

std::string capability() {
  const char* chosen = fastcaps_capability();
  if (chosen == nullptr) {
    throw py::value_error(std::string("FASTCAPS_CPU_CAPABILITY names a level that is unknown or that this processor "
                                      "cannot run; this build holds: ") +
                          fastcaps_capabilities_built());
  }
  return chosen;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What the native library of fastcaps was built with, and what it chose on this machine.";
  m.def("build_info", &build_info,
        "Version, compiler, the torch built against, the stable ABI targeted, flags common to all native code "
        "(`flags`), those added for each instruction set (`level_flags`), and the CUDA kernels: toolkit, architectures "
        "and flags (`cuda`), or None and why there are none (`cuda_why_not`).");
  m.def("capabilities_built", &capabilities_built, "The instruction-set levels that this build holds, lowest first.");
  m.def("capability", &capability,
        "The level that the kernels run at on this machine: the highest that the processor has, or the one that the "
        "environment variable FASTCAPS_CPU_CAPABILITY forces.\n\nRaises ValueError if it forces an unknown or "
        "unsupported one.");
  m.def("multiply_adds", &fastcaps_multiply_adds, py::arg("rounds"), py::call_guard<py::gil_scoped_release>(),
        "Run so many rounds of float32 multiply-adds and nothing else, on this thread and at that level; return the "
        "operations, two for each. The time that it takes is the machine's peak.");
}
