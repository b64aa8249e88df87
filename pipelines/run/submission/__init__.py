"""`laminar submit`: a pipeline submitted separately, its outline, and the process that resubmits it."""
