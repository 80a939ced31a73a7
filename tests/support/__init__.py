"""What tests of several rooms share: references, laws, random inputs, ranks and processes."""
