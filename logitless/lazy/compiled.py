"""Lazy logits and torch.compile.

Dynamo, the part of torch.compile that traces Python code into graphs, cannot put lazy logits into a
graph. So a fused head ends the graph (`outside_of_graph`), runs uncompiled, and returns lazy
logits. Dynamo compiles the code before the head. After the head, Dynamo compiles only code that
does not read the logits. Each operation on lazy logits runs uncompiled too. With `fullgraph=True`,
the graph must not end before the end of the function. So the head computes plain logits inside the
graph.
"""

from collections.abc import Callable
from typing import Any


def leave_to_python(*functions: Any) -> bool:
    """Makes Dynamo run these functions, and all functions that they call, without compiling them.

    Dynamo ends its graph before a call of these functions. Lazy logits can be an argument of a
    function that the user compiled. Without `leave_to_python`, Dynamo would then compile our own
    functions too. This compilation takes many seconds. The function torch.compiler.disable has the
    same effect as `leave_to_python`, but imports the compiler. Returns False if this version of
    PyTorch has no setting to skip functions.
    """
    try:
        from torch._C._dynamo import eval_frame as frames

        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for function in functions:
            function = getattr(function, "__func__", function)
            frames.set_code_exec_strategy(function.__code__, skip)
            function._torchdynamo_disable = True
            function._torchdynamo_disable_msg = "lazy logits cannot be inside of a graph"
        return True
    except (ImportError, AttributeError):
        # This version of PyTorch cannot skip functions, so Dynamo compiles our functions too.
        return False


def outside_of_graph(function: Callable, *args, **kwargs) -> Any:
    """Calls a function uncompiled.

    Dynamo ends its graph here. The caller has checked that this is possible (`can_leave_graph`).
    """
    return function(*args, **kwargs)


_can_leave = leave_to_python(outside_of_graph)


def can_leave_graph() -> bool:
    """Whether Dynamo is tracing, and is allowed to end its graph here.

    The result is False with `fullgraph=True` and in torch.export. The result is also False inside
    functions that Dynamo traces into a separate graph, such as torch.utils.checkpoint.
    """
    tracer = _tracer()
    whole = tracer is None or tracer.one_graph or tracer.error_on_graph_break
    return _can_leave and not whole and tracer.output.is_root_tracer()


def can_write() -> bool:
    """Whether Dynamo is tracing and also supports writes to attributes of existing objects."""
    tracer = _tracer()
    return tracer is not None and not tracer.export and tracer.output.is_root_tracer()


def _tracer() -> Any:
    """Returns Dynamo's tracer, or None if Dynamo is not tracing."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer = InstructionTranslator.current_tx()
        _ = tracer.one_graph, tracer.error_on_graph_break, tracer.export
        return tracer
    except (ImportError, AttributeError):
        # Dynamo is not tracing, or its tracer lacks one of these attributes in this PyTorch
        # version.
        return None


# While Dynamo traces, it calls `can_leave_graph` and `can_write`, and treats their results as
# constants. This loop has the same effect as torch.compiler.assume_constant_result, but does not
# import the compiler.
for _function in (can_leave_graph, can_write):
    _function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
