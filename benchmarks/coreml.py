"""One matrix product as a CoreML program for the Neural Engine, which nothing but CoreML reaches.

coremltools builds programs on every system and runs them on macOS only. It bakes the weight in, in float16,
and compiles for one number of rows.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusionml.machine import attempt

INSTALL = "it needs coremltools, the extra `ane` of FusionML"
Half = NDArray[np.float16]


def unavailable() -> str | None:
    """Why no program can be run here."""
    if sys.platform != "darwin":
        return f"the Neural Engine is reached through CoreML, which only macOS has; this is {sys.platform}"
    return None if importlib.util.find_spec("coremltools") else INSTALL


def build(weight: Half, rows: int, *, load: bool = True) -> Any:
    """The program `y = x @ weight.T` for x `[rows, K]`, allowed on the CPU and the Neural Engine.

    Args:
        weight: `[N, K]` float16.
        rows: of every call.
        load: compile it for this machine; False only builds it, which works on every system.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.mil import types

    spec = Builder.TensorSpec(shape=(rows, weight.shape[1]), dtype=types.fp16)

    @Builder.program(input_specs=[spec], opset_version=ct.target.iOS16)
    def product(x: Any) -> Any:
        return Builder.linear(x=x, weight=weight, name="y")

    return ct.convert(
        product,
        convert_to="mlprogram",
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        minimum_deployment_target=ct.target.macOS13,
        skip_model_load=not load,
    )


def predict(program: Any, x: Half) -> Half:
    """`[rows, N]` float16 for x `[rows, K]`. macOS only."""
    return np.asarray(program.predict({"x": x})["y"], dtype=np.float16)


def on_the_neural_engine(program: Any) -> bool | None:
    """Whether the system means to run the product there; None where it does not tell (before macOS 14.4)."""
    return attempt(lambda: _preferred_device(program) == "MLNeuralEngineComputeDevice")


def _preferred_device(program: Any) -> str:
    from coremltools.models.compute_plan import MLComputePlan

    plan = MLComputePlan.load_from_path(program.get_compiled_model_path(), program.compute_unit)
    operations = plan.model_structure.program.functions["main"].block.operations
    product = next(operation for operation in operations if operation.operator_name.endswith("linear"))
    usage = plan.get_compute_device_usage_for_mlprogram_operation(product)
    return type(usage.preferred_compute_device).__name__
