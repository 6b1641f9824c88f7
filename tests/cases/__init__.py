"""Classes of faults that other engines' users and newcomers have met, each with its siblings."""
