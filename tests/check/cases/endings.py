# How a script ends, where it does not end well.
# case: nothing | note no optimizer
# case: spawn | note spawns
# case: missing | WRONG start
#     error="FileNotFoundError: [Errno 2] No such file or directory: 'data.txt'"
# case: watched | note only here error="AssertionError: watched"
# case: error | WRONG fails steps=7 error="AssertionError: too many"
# case: quit | WRONG fails steps=7 error="too many"
# case: dump | WRONG fails steps=7 error="rank 1: too many"
# case: memory | WRONG fails steps=7 error="rank 1 was ended by SIGKILL"
# case: leaves | WRONG ends early rank=1 made=5
# case ci: skip | WRONG hang | quick --timeout 40
# case: deadlock | WRONG hang | quick --timeout 40
# case: sleep | WRONG hang timeout=40 | quick --timeout 40
# case: busy | note slow timeout=40 | quick --timeout 40
# case: more | WRONG steps one=10 two=11; note left out
# case: left | WRONG left; ok gradient
# case: thread | ok gradient
# case: swallow-hang | ok gradient; WRONG failure | failure --timeout 40
# case: swallow | ok gradient; WRONG failure what="the exit code is 0" | failure
# case: needs-two | note not replayed ranks=2;
#     note one process error="AssertionError: alone" | alone
# case: idle | note not replayed ranks=2; note no step what="one process alone" | alone
# case: other-weights | note not replayed; note alone differs | alone
import faulthandler
import threading

from common import *


def spin():
    while True:
        sum(range(1000))


def work_on():
    """A thread of the script, without which it cannot go on."""
    while True:
        time.sleep(0.001)
        assert model is not None


dist.init_process_group("gloo")
if case == "nothing":
    sys.exit()
if case == "spawn":
    torch.multiprocessing.spawn(print, nprocs=2)
if case == "missing":
    open("data.txt")
if case == "sleep":
    time.sleep(1000)
if case == "watched":
    assert not torch._C._len_torch_function_stack(), "watched"
if case == "busy":
    spin()
if case == "needs-two":
    assert size > 1, "alone"
if case == "left":
    subprocess.Popen(["sleep", "1000"])
if case == "deadlock":
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.getsignal(number))  # as Lightning does at its end
    threading.Thread(target=spin, daemon=True).start()
if case == "dump" and rank == 0:
    faulthandler.register(signal.SIGTERM, chain=True)
model = mlp()
if case == "other-weights" and size == 1:
    model.append(nn.Linear(8, 8))
if case == "thread":
    threading.excepthook = lambda _: os._exit(1)
    threading.Thread(target=work_on, daemon=True).start()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)


def main():
    for step, (x, y) in enumerate(loader):
        if case == "idle" and size == 1:
            break
        if case == "skip" and rank == 1 and step == 5:
            continue
        if case == "leaves" and rank == 1 and step == 5:
            sys.exit()  # as with fewer batches
        if step == 7:
            assert case != "error", "too many"
            if case == "memory" and rank == 1:
                print("step 7", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "quit" or case == "dump" and rank == 1:
                sys.exit("too many" if case == "quit" else "rank 1: too many")
        loss = mse(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if case == "deadlock" and rank == 1 and step == 5:
            dist.recv(torch.zeros(1), src=0)


try:
    main()
except RuntimeError as error:
    if not case.startswith("swallow"):
        raise
    print(error)
    if case == "swallow":
        sys.exit()
if case == "more" and rank == 1:
    optimizer.step()
dist.barrier()  # where the other rank may never come
dist.destroy_process_group()
