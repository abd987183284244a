from .server_sizes import ServerSizes as ServerSizes
from .simulation.replay import RecordedEngine as RecordedEngine
from .simulation.replay import ReplayJob as ReplayJob
