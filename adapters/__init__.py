"""How data crosses a stage border: tensors, handles, shared memory, windows."""
