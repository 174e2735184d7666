"""Operations that have several implementations; callers name the operation, never the implementation."""
