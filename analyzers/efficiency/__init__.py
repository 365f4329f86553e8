"""How long operations take on a device: an efficiency model fitted to measured ones, with its error.

`efficiency_for` picks the model of a device; `EfficiencyModel.gemm` and `EfficiencyModel.attention` estimate one
operation. docs/efficiency.md has the formulas, the parameters and the errors on shapes that the fit did not see.
"""

from phaseprof.analyzers.efficiency.choosing import efficiency_for
from phaseprof.analyzers.efficiency.estimate import Estimate, total
from phaseprof.analyzers.efficiency.model import Basis, EfficiencyModel

__all__ = ["Basis", "EfficiencyModel", "Estimate", "efficiency_for", "total"]
