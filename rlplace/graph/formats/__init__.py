"""Public forms of op graphs: what peers publish, and ONNX files."""
