"""The matrix of everything that exists, and what each precision costs: operator x DSL x target x precision x layout."""
