# launches.sed -- rewrites what only nvcc's front end reads, for device.h, and the number of blocks of one kernel:
# sed -z -E -f launches.sed FILE.cuh
# a launch K<<<grid, block, shared, stream>>>(arguments), of a function or template; then of an expression
s/([^A-Za-z0-9_>.])([A-Za-z_][A-Za-z0-9_]*(<[^;<>()]*(<[^;<>]*>)?[^;<>()]*>)?)([ \n\\]*)<<</\1[=](auto... a) { \2(a...); }\5 % LaunchOf(/g
s/<<</ % LaunchOf(/g
s/>>>\(/)(/g
# the most threads of a block that a kernel was compiled for
s/(__launch_bounds__\(([^()]*)\)[^{};]*\{)/\1 emulator_bounds(\2);/g
# device.h has what kernels use of these
s/#include <(cooperative_groups(\/reduce)?|mma|cuda_pipeline)\.h>/\/\/&/g
# the array of dynamic shared memory
s/extern __shared__ ((__align__|alignas)\([0-9]+\) )?([A-Za-z_][A-Za-z_0-9: ]*) ([A-Za-z_][A-Za-z_0-9]*)\[\];/\3* const \4 = (\3*)emulator_shared;/g
# where g++ wants the alignment of a static array
s/__shared__ (alignas\([0-9]+\))/\1 __shared__/g
# two blocks a processor, as on a card. With 264 most blocks add up zeros, and took two thirds of the time of two cards
s/SUM_BLOCKS = 264/SUM_BLOCKS = 8/
