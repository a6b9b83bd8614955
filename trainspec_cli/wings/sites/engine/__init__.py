"""The part of training at distant sites that runs in a site's workers."""
