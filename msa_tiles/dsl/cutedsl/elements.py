"""The DSL's types of the elements that specs name."""

import cutlass

ELEMENTS = {"bfloat16": cutlass.BFloat16}
