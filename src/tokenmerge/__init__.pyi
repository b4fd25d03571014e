# The public names, each written once. `__init__.py` reads this file: `__all__` and the lazy lookup follow from it.
from .backbones.base import Unsupported as Unsupported
from .backbones.zero_shot import ZeroShotClassifier as ZeroShotClassifier
from .calibration.calibrate import Calibration as Calibration
from .calibration.calibrate import calibrate as calibrate
from .calibration.compare import Comparison as Comparison
from .calibration.compare import compare as compare
from .calibration.compare import stress as stress
from .calibration.freeze import Frozen as Frozen
from .calibration.freeze import freeze as freeze
from .calibration.optimize import Outcome as Outcome
from .calibration.optimize import optimize as optimize
from .calibration.tune import Tuned as Tuned
from .calibration.tune import tune as tune
from .core.theory import (
    merging_error as merging_error,
)
from .core.theory import (
    merging_error_bounds as merging_error_bounds,
)
from .core.theory import (
    merging_error_of as merging_error_of,
)
from .core.tokens import restore as restore
from .data.checkpoint import load_model as load_model
from .data.images import Images as Images
from .data.load import load_images as load_images
from .deployment.canary import Alarm as Alarm
from .deployment.canary import Canary as Canary
from .deployment.export import Exported as Exported
from .deployment.export import export as export
from .deployment.int8 import Int8 as Int8
from .deployment.int8 import Quantised as Quantised
from .deployment.model_file import ModelFile as ModelFile
from .deployment.predict import Audit as Audit
from .deployment.predict import Predicted as Predicted
from .deployment.predict import predict as predict
from .engine.cost import Cost as Cost
from .engine.patch import apply as apply
from .engine.patch import remove as remove
from .engine.reduce import ReducedTokens as ReducedTokens
from .engine.reduce import reduce as reduce
from .engine.trace import Trace as Trace
from .engine.trace import trace as trace
from .evaluation.analyze import Impact as Impact
from .evaluation.analyze import analyze as analyze
from .evaluation.bench import Timing as Timing
from .evaluation.bench import bench as bench
from .evaluation.certify import Certificate as Certificate
from .evaluation.certify import certify as certify
from .evaluation.evaluate import Result as Result
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.measurement import Measurement as Measurement
from .evaluation.prove import Proof as Proof
from .evaluation.prove import prove as prove
from .methods.base import Method as Method
from .methods.presets import paper_rows as paper_rows
from .methods.serialization import load as load
from .methods.serialization import load_about as load_about
from .methods.serialization import parse as parse
from .methods.serialization import save as save
from .training.finetune import finetune as finetune
from .training.recipe import Recipe as Recipe
from .training.released import convert as convert
from .visualization.figures import visualize as visualize
from .visualization.merge_maps import draw_maps as draw_maps
from .visualization.merge_maps import merge_map as merge_map

# methods:begin
from .methods.atm import ATM as ATM
from .methods.ats import ATS as ATS
from .methods.avit import AViT as AViT
from .methods.bat import BAT as BAT
from .methods.constant_threshold import ConstantThreshold as ConstantThreshold
from .methods.diffrate import DiffRate as DiffRate
from .methods.dynamicvit import DynamicViT as DynamicViT
from .methods.evit import EViT as EViT
from .methods.evovit import EvoViT as EvoViT
from .methods.iared2 import IARED2 as IARED2
from .methods.mctf import MCTF as MCTF
from .methods.no_merge import NoMerge as NoMerge
from .methods.pitome import PiToMe as PiToMe
from .methods.ppt import PPT as PPT
from .methods.random_merge import RandomMerge as RandomMerge
from .methods.tofu import ToFu as ToFu
from .methods.tome import ToMe as ToMe
from .methods.tome import TopR as TopR
from .methods.zero_tprune import ZeroTPrune as ZeroTPrune
# methods:end

__version__: str
__all__: list[str]
