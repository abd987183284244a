from .cascade_command import cascade_tune as cascade_tune
from .command import fleet_serve as fleet_serve
from .replica_set import ReplicaSet as ReplicaSet
from .replicas import Replica as Replica
from .routing import RouterName as RouterName
