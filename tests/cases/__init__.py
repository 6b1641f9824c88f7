"""Classes of faults that strangers' inputs found."""
