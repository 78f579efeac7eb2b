# %% [markdown]
# # Export: torch.export, AOTInductor, ONNX
#
# Three ways to run a network outside of this program. A new process loads each file and must return the same results.
#
# | | content of the file | runs the routing | needed to load it |
# |---|---|---|---|
# | `torch.export` | a graph with fastcaps' ops | the kernels of the machine that loads it | torch, fastcaps |
# | AOTInductor | compiled code that calls the ops | the same kernels | torch, fastcaps; the same kind of machine |
# | ONNX | plain formulas instead of the ops | the runtime, which **stores all votes** | only an ONNX runtime |

# %%
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fastcaps

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The network
#
# One convolution and dynamic routing. The batch size is dynamic, between 1 and 64.


# %%
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 64, 3, stride=2)
        self.digits = fastcaps.DynamicRouting(8 * 9, 10, in_dim=8, out_dim=16, pose="vector")

    def forward(self, images):
        children = self.conv(images).unflatten(1, (8, 8)).movedim(2, -1).flatten(1, 3)
        return self.digits(fastcaps.functional.squash(children))


net = Small().eval()
images = torch.rand(3, 1, 8, 8)
with torch.no_grad():
    torch.save((images, net(images)), folder / "wanted.pt")
batch = torch.export.Dim("batch", min=1, max=64)

# %% [markdown]
# ## torch.export
#
# The graph contains the op, but no backend: the machine that loads it chooses the kernels.

# %%
program = torch.export.export(net, (images,), dynamic_shapes=({0: batch},))
torch.export.save(program, folder / "net.pt2")
print("ops of fastcaps:", {str(node.target) for node in program.graph.nodes if str(node.target).startswith("fastcaps")})

# %% [markdown]
# ## AOTInductor
#
# This compiles the ordinary layers to machine code, which needs a C++ compiler and some seconds. The routing remains a
# call of the op.

# %%
torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "net-compiled.pt2"))
print("compiled:", (folder / "net-compiled.pt2").stat().st_size // 1000, "kB")

# %% [markdown]
# ## ONNX
#
# ONNX has no routing op, so the export writes its formulas and loses the kernels: the runtime stores the votes, and
# reads and writes them in every iteration. The file can run a network, but not train it. This cell needs
# `pip install onnx onnxscript onnxruntime`; without them it is skipped.

# %%
if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
    shapes = ({0: batch},)
    written = torch.onnx.export(net, (images,), folder / "net.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False)
    print("ONNX nodes, instead of one op and a few layers:", len(written.model.graph))
else:
    print("ONNX skipped: its packages are not installed")

# %% [markdown]
# ## A new process
#
# The new process has none of the code above. The first two files only need `import fastcaps`, which registers the ops.
# We compare results for the exported batch and for a batch of one. Expect differences of 1e-6 or less.

# %%
LOADER = """
import sys
from pathlib import Path
import torch
import fastcaps  # its ops are in the files

folder = Path(sys.argv[1])
images, wanted = torch.load(folder / "wanted.pt")
runs = {
    "torch.export": torch.export.load(folder / "net.pt2").module(),
    "AOTInductor": torch._inductor.aoti_load_package(str(folder / "net-compiled.pt2")),
}
if (folder / "net.onnx").exists():
    import onnxruntime
    session = onnxruntime.InferenceSession(str(folder / "net.onnx"))
    runs["ONNX"] = lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
for name, run in runs.items():
    with torch.no_grad():
        worst = max((run(images[:size]) - wanted[:size]).abs().max() for size in (3, 1))
    print(f"{name} in a new process: differs by {worst / wanted.abs().max():.1e} of the largest value")
"""
done = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", LOADER, folder], stdout=subprocess.PIPE, text=True, check=True
)
print(done.stdout)
