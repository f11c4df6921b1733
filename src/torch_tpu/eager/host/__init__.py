"""Where the host has a part: the CPU fallback, what the compiler refuses, changing shapes, what the CPU would say."""
