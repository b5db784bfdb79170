import torch,sys
from adv import *
