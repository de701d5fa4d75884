"""What becomes of a model's result, read from scripts as people write them."""

from __future__ import annotations

import textwrap

import pytest

from stoker.doctor.dataflow import Calls, Place, find_use


def use(source, *, library=False):
    """Return the use of the call at the lines marked CALL, CALL2, ... outwards; UPDATE marks calls of backward.

    UPDATE2, ... mark the lines outwards of the one backward pass of which UPDATE1 is the innermost.
    """
    source = textwrap.dedent(source)
    lines = source.splitlines()
    marked = {}
    for number, line in enumerate(lines, 1):
        for word in line.partition("# ")[2].split():
            marked.setdefault(word, []).append(Place("a.py", number, function_of(lines, number)))
    chain = [marked[name][0] for name in ("CALL", "CALL2", "CALL3", "CALL4") if name in marked]
    updates = [(place,) for place in marked.get("UPDATE", [])]
    updates.append(tuple(marked[f"UPDATE{at}"][0] for at in range(1, 5) if f"UPDATE{at}" in marked))
    return find_use(Calls(tuple(chain), not library), updates, lambda _: source)


def function_of(lines, number):
    indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    for line in reversed(lines[: number - 1]):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            indent = len(line) - len(line.lstrip())
            if line.strip().startswith("def "):
                return line.strip()[4:].partition("(")[0]
    return "<module>"


UPDATES = {
    "the training itself": """
        for x, y in loader:
            loss = criterion(model(x), y)  # CALL
            optimizer.zero_grad()
            loss.backward()  # UPDATE
            optimizer.step()
        """,
    "in one expression": """
        for x, y in loader:
            scaler.scale(criterion(model(x), y)).backward()  # CALL UPDATE
        """,
    "a teacher": """
        for x in loader:
            with torch.no_grad():
                soft = teacher(x)  # CALL
            loss = distance(model(x), soft.detach())
            loss.backward()  # UPDATE
        """,
    "a generator beside its critic": """
        def train():
            for real in loader:
                with torch.no_grad():
                    fake = generator(noise())  # CALL
                loss_d = critic(fake).mean() - critic(real).mean()
                optimizer_d.zero_grad()
                loss_d.backward()  # UPDATE
                optimizer_d.step()
                print(loss_d.item())
        """,
    "pseudo labels, thresholded": """
        model.eval()
        with torch.no_grad():
            guess = model(unlabelled)  # CALL
        model.train()
        keep, labels = guess.softmax(1).max(1)
        mask = keep > 0.9
        loss = criterion(model(unlabelled[mask]), labels[mask])
        total = 0.5 * loss + other
        accelerator.backward(total)  # UPDATE
        """,
    "in the next round of the loop": """
        target = None
        for x in loader:
            if target is not None:
                loss = (model(x) - target).square().mean()
                loss.backward()  # UPDATE
            target = model(x).detach()  # CALL
        """,
    "through a list": """
        outputs = []
        for x in chunks:
            outputs.append(model(x))  # CALL
        loss = torch.cat(outputs).mean()
        loss.backward()  # UPDATE
        """,
    "through an item of a dict": """
        parts["kl"] = divergence(reference(x), model(x))  # CALL
        sum(parts.values()).backward()  # UPDATE
        """,
    "returned by a function": """
        @torch.no_grad()
        def targets(batch):
            q = network(batch.next).max(1).values  # CALL
            return batch.reward + 0.9 * q

        def learn(batch):
            expected = targets(batch)  # CALL2
            loss = criterion(network(batch.state), expected)
            loss.backward()  # UPDATE
        """,
    "given to a function that calls backward": """
        def learn(x, target):
            loss = (model(x) - target).abs().mean()
            loss.backward()  # UPDATE
            return loss.item()

        for x in loader:
            with torch.inference_mode():
                target = teacher(x)  # CALL
            value = learn(x, target)  # UPDATE
        """,
    "given to another file's function": """
        for x in loader:
            with torch.no_grad():
                target = teacher(x)  # CALL
            value = engine.learn(x, target)  # UPDATE
        """,
    "through a replay memory and a function of the script": """
        memory = deque(maxlen=1000)

        def optimize():
            rows = random.sample(memory, 32)
            loss = criterion(network(stack(rows)), rewards(rows))
            loss.backward()  # UPDATE

        state = env.reset()
        while True:
            with torch.no_grad():
                action = network(state).argmax()  # CALL
            next_state, reward = env.step(action.item())
            memory.append((state, action, reward))
            state = next_state
            optimize()  # UPDATE
        """,
    "through an attribute": """
        class Learner:
            def collect(self):
                with torch.no_grad():
                    self.values = self.network(self.states)  # CALL

            def learn(self):
                advantage = self.returns - self.values
                loss = (advantage * self.logs()).mean()
                loss.backward()  # UPDATE

            def step(self):
                self.collect()  # CALL2
                self.learn()  # UPDATE
        """,
    "in a closure of the optimizer": """
        for x in loader:
            with torch.no_grad():
                target = teacher(x)  # CALL

            def closure():
                optimizer.zero_grad()
                loss = criterion(model(x), target)
                loss.backward()  # UPDATE
                return loss

            optimizer.step(closure)  # UPDATE
        """,
    "yielded": """
        def rollouts():
            for state in states:
                yield state, policy(state)  # CALL

        for state, value in rollouts():  # CALL2
            (value - model(state)).square().mean().backward()  # UPDATE
        """,
    "in place": """
        for x in loader:
            bank = torch.zeros(8)
            bank.copy_(encoder(x).mean(0))  # CALL
            loss = (model(x) - bank).mean()
            loss.backward()  # UPDATE
        """,
    "by torch.autograd.grad": """
        with torch.no_grad():
            target = model(x)  # CALL
        grads = torch.autograd.grad((net(x) - target).sum(), net.parameters())
        """,
    "in a walrus": """
        if (target := teacher(x)) is not None:  # CALL
            criterion(model(x), target).backward()  # UPDATE
        """,
    "in a comprehension": """
        targets = [teacher(view) for view in views]  # CALL
        loss = sum(criterion(model(x), one) for one in targets)
        loss.backward()  # UPDATE
        """,
    "after an if": """
        if step > 10:
            target = teacher(x)  # CALL
        else:
            target = y
        loss = criterion(model(x), target)
        loss.backward()  # UPDATE
        """,
}

UPDATES |= {
    "a memory that is a parameter": """
        def collect(world, policy, memory):
            state = world.state
            with torch.no_grad():
                action = policy(state).argmax(1)  # CALL
            after, reward = world.step(action)
            memory.append((state, action, reward, after))

        def learn(policy, optimizer, memory):
            state, action, reward, after = random.choice(memory)
            loss = criterion(policy(state), action)
            loss.backward()  # UPDATE

        def main():
            for step in range(9):
                collect(world, policy, memory)  # CALL2
                learn(policy, optimizer, memory)  # UPDATE
        """,
    "a memory that functions share": """
        memory = deque(maxlen=9)

        def act():
            state = world.state
            action = policy(state).sample()  # CALL
            memory.append((state, action))

        def train():
            state, action = random.choice(memory)
            loss = -policy(state).log_prob(action).mean()
            loss.backward()  # UPDATE

        for step in range(9):
            act()  # CALL2
            train()  # UPDATE
        """,
    "a memory that the script itself reads": """
        rows = []

        def act():
            rows.append(policy(world.state))  # CALL

        for step in range(9):
            act()  # CALL2
            batch = torch.stack(rows)
            criterion(model(batch), 0).backward()  # UPDATE
        """,
    "a world that is read afterwards": """
        def main():
            for step in range(9):
                seen = []
                for _ in range(4):
                    state = world.state
                    with torch.no_grad():
                        action = agent(state).argmax(1)  # CALL
                    world.step(action)
                    seen.append(state)
                loss = agent(torch.cat(seen)).mean()
                loss.backward()  # UPDATE
        """,
    "recorded by an object of a closure": """
        def main():
            def play():
                state = world.state
                action = agent(state).argmax(1)  # CALL
                memory.record(state, action)

            def learn():
                state, action = memory.sample()
                loss = criterion(agent(state), action)
                loss.backward()  # UPDATE

            for step in range(9):
                play()  # CALL2
                learn()  # UPDATE
        """,
    "an item of a parameter": """
        def refresh(model, data, soft, which):
            with torch.no_grad():
                soft[which] = 0.6 * soft[which] + 0.4 * model(data[which])  # CALL

        def main():
            soft = torch.zeros(9)
            for step in range(9):
                refresh(model, data, soft, which=step)  # CALL2
                loss = distance(model(data), soft)
                loss.backward()  # UPDATE
        """,
    "a variable of the function around": """
        def main():
            chosen = None

            def choose():
                nonlocal chosen
                with torch.no_grad():
                    entropy = entropy_of(model(pool))  # CALL
                chosen = entropy.topk(9).indices

            def update():
                loss = criterion(model(pool[chosen]), 0)
                loss.backward()  # UPDATE

            for step in range(9):
                choose()  # CALL2
                update()  # UPDATE
        """,
    "the condition of an update": """
        for real in loader:
            with torch.no_grad():
                right = (critic(real) > 0).float().mean()  # CALL
            if right < 0.8:
                loss = criterion(critic(real), 1)
                loss.backward()  # UPDATE
        """,
    "the loss of two results": """
        def compute(model, x, y):
            out = model(x)  # CALL
            return criterion(out, y), (out.argmax(1) == y).sum()

        for x, y in loader:
            loss, right = compute(model, x, y)  # CALL2
            loss.backward()  # UPDATE
        """,
    "the loss of a dict that a function returns": """
        def compute(batch):
            out = model(batch)  # CALL
            return dict(loss=out.mean(), right=0)

        for batch in loader:
            compute(batch)["loss"].backward()  # CALL2 UPDATE
        """,
    "a tuple whose parts are named later": """
        def compute(batch):
            return model(batch), 0  # CALL

        for batch in loader:
            both = compute(batch)  # CALL2
            criterion(both[0]).backward()  # UPDATE
        """,
    "the whole of a dict": """
        parts = {}
        for x in loader:
            parts["a"] = model(x)  # CALL
            total = sum(parts.values())
            total.backward()  # UPDATE
        """,
    "an attribute of an object that a method fills": """
        class Agent:
            def collect(self):
                self.memory.append(self.policy(self.state))  # CALL

            def learn(self):
                loss = torch.stack(self.memory).mean()
                loss.backward()  # UPDATE

        agent = Agent()
        while True:
            agent.collect()  # CALL2
            agent.learn()  # UPDATE
        """,
}

TOLD = {
    "a validation that reuses every name": """
        for x, y in loader:
            output = model(x)
            loss = criterion(output, y)
            optimizer.zero_grad()
            loss.backward()  # UPDATE
            optimizer.step()
            with torch.no_grad():
                output = model(x_val)  # CALL
                loss = criterion(output, y_val)
            print(loss.item())
        """,
    "without no_grad": """
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()  # UPDATE
            held = criterion(model(x_val), y_val).item()  # CALL
            history.append(held)
        """,
    "a function that returns numbers": """
        def evaluate(model, loader):
            total = 0
            with torch.no_grad():
                for x, y in loader:
                    total += criterion(model(x), y).item()  # CALL
            return total / len(loader)

        def main():
            best = 9e9
            for step, (x, y) in enumerate(loader):
                train(x, y)  # UPDATE
                value = evaluate(model, held)  # CALL2
                if value < best:
                    best = value
                    torch.save(model.state_dict(), "best.pt")
                scheduler.step(value)
                writer.add_scalar("held", value, step)

        main()
        """,
    "a progress bar": """
        bar = tqdm(loader)
        for x, y in bar:
            loss = criterion(model(x), y)
            loss.backward()  # UPDATE
            guess = model(x).argmax(1)  # CALL
            bar.set_postfix(right=(guess == y).float().mean().item(), loss=loss.item())
        """,
    "shown only": """
        criterion(model(x), y).backward()  # UPDATE
        logger.info("%s", model(x_val).mean())  # CALL
        """,
    "a method beside the training's": """
        class Fitter:
            def train_step(self, x, y):
                loss = criterion(self.model(x), y)
                loss.backward()  # UPDATE
                return loss.item()

            def score(self, x, y):
                guess = self.model(x)  # CALL
                return float((guess - y).square().mean())

            def fit(self):
                for x, y in self.loader:
                    value = self.train_step(x, y)  # UPDATE
                    held = self.score(x_val, y_val)  # CALL2
                    print(value, held)
        """,
    "a history that all functions share": """
        history = []

        def validate():
            with torch.no_grad():
                history.append(criterion(model(x_val), y_val).item())  # CALL

        for x, y in loader:
            criterion(model(x), y).backward()  # UPDATE
            validate()  # CALL2
        print(min(history))
        """,
    "one of two results": """
        def compute(model, x, y):
            loss = criterion(model(x), y)
            with torch.no_grad():
                right = (model(x_val).argmax(1) == y_val).float().mean()  # CALL
            return loss, right

        for x, y in loader:
            loss, right = compute(model, x, y)  # CALL2
            loss.backward()  # UPDATE
            print(right)
        """,
    "one of the results in a dict": """
        def compute(batch):
            loss = criterion(model(batch.x), batch.y)
            guess = model(batch.x)  # CALL
            return {"loss": loss, "right": (guess == batch.y).sum()}

        for batch in loader:
            told = compute(batch)  # CALL2
            told["loss"].backward()  # UPDATE
            print(told["right"])
        """,
    "another item of a dict": """
        logs = {}
        for x, y in loader:
            logs["loss"] = criterion(model(x), y)
            with torch.no_grad():
                logs["held"] = criterion(model(x_val), y_val)  # CALL
            logs["loss"].backward()  # UPDATE
            print({key: value.item() for key, value in logs.items()})
        """,
    "a function that trains where another line calls it": """
        def run(x, y, train):
            with torch.set_grad_enabled(train):
                loss = criterion(model(x), y)  # CALL
            if train:
                loss.backward()  # UPDATE1
                optimizer.step()
            return loss.item()

        for x, y in loader:
            loss = run(x, y, train=True)  # UPDATE2
            held = run(x_val, y_val, train=False)  # CALL2
            print(loss, held)
        """,
    "a branch of the model itself": """
        class Task(nn.Module):
            def forward(self, x, y):
                loss = criterion(self.net(x), y)
                with torch.no_grad():
                    right = (self.net(self.x_val) > 0).float().mean()  # CALL
                return loss, right

        for x, y in loader:
            loss, right = task(x, y)  # CALL2
            loss.backward()  # UPDATE
            print(right)
        """,
    "the best so far": """
        for x, y in loader:
            criterion(model(x), y).backward()  # UPDATE
            value = criterion(model(x_val), y_val).item()  # CALL
            if value < best:
                best = value
                torch.save(model.state_dict(), "best.pt")
        """,
    "a loop over the samples of a test": """
        for epoch in range(9):
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()  # UPDATE
                right = 0
                with torch.no_grad():
                    for x, y in test_loader:
                        right += (model(x).argmax(1) == y).sum().item()  # CALL
                print(right)
        """,
}

KEPT = {
    "the end of the training": """
        for x, y in loader:
            criterion(model(x), y).backward()  # UPDATE
            value = criterion(model(x_val), y_val).item()  # CALL
            if value < 0.1:
                break
        """,
    "the length of a loop": """
        while distance(model(x_val), y_val) > 0.1:  # CALL
            criterion(model(x), y).backward()  # UPDATE
        """,
    "a list that another object got": """
        rows = []
        learner = Learner(model, rows)
        for step in range(9):
            rows.append(model(world.state))  # CALL
            learner.learn()  # UPDATE
        """,
    "a method of an object that nobody read": """
        class Watcher:
            def look(self):
                self.value = self.model(self.x)  # CALL

        watcher = Watcher()
        for x, y in loader:
            criterion(model(x), y).backward()  # UPDATE
            watcher.look()  # CALL2
        """,
    "an attribute that nobody reads here": """
        for x, y in loader:
            criterion(model(x), y).backward()  # UPDATE
            holder.last = model(x_new)  # CALL
        """,
    "made for what it does": """
        for x, y in loader:
            teacher(x)  # CALL
            criterion(model(x), features["last"]).backward()  # UPDATE
        """,
    "a call whose result is replaced unread": """
        for x in loader:
            made = model(x)  # CALL
            out = teacher(made)
            out = teacher(x)
            distance(*features).backward()  # UPDATE
        """,
    "its result dropped by name": """
        _ = teacher(x)  # CALL
        criterion(model(x), features["last"]).backward()  # UPDATE
        """,
    "an object elsewhere": """
        class Agent:
            def act(self, state):
                action = self.policy(state)  # CALL
                self.memory.push(state, action)

        def main():
            agent, learner = Agent(), Learner()
            for step in range(9):
                agent.act(1)  # CALL2
                learner.learn()  # UPDATE
        """,
    "a queue of another process": """
        with torch.no_grad():
            action = policy(state)  # CALL
        send_to_world(action)
        learn()  # UPDATE
        """,
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_result_that_training_needs(name):
    assert use(UPDATES[name]).reaches == "update"


@pytest.mark.parametrize("name", TOLD)
def test_a_result_that_only_people_read(name):
    assert use(TOLD[name]).reaches == "nothing"


@pytest.mark.parametrize("name", KEPT)
def test_a_result_that_others_may_need(name):
    assert use(KEPT[name]).reaches == "object"


def test_a_result_returned_to_a_library_is_its_loss():
    source = """
        class Module(LightningModule):
            def training_step(self, batch, number):
                loss = criterion(self.net(batch), 0)  # CALL
                self.log("loss", loss)
                return loss
        """
    assert use(source, library=True).reaches == "update"
    assert use(source).reaches == "nothing"


def test_gradients_are_off_in_a_with_and_by_a_decorator():
    assert use(UPDATES["a teacher"]).without_gradient
    assert use(UPDATES["returned by a function"]).without_gradient
    assert use(UPDATES["given to a function that calls backward"]).without_gradient
    assert not use(UPDATES["the training itself"]).without_gradient
    for told, off in (("False", True), ("True", False), ("phase == 'train'", False)):
        source = f"""
            with torch.set_grad_enabled({told}):
                out = model(x)  # CALL
            """
        assert use(source).without_gradient == off


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("val_loss = criterion(model(x), y)", True),
        ("out = model(x_test)", True),
        ("acc = right(model(x))", True),
        ("self.metrics.update(model(x))", True),
        ("out = model(x)", False),
        ("value = model(latest)", False),
        ("out = self.model(attest)", False),
    ],
)
def test_names_say_evaluation(line, says):
    assert use(f"{line}  # CALL").evaluates == says
    assert use(f"def validate(self):\n    {line}  # CALL").evaluates


def test_a_source_that_cannot_be_read_is_unknown():
    place = Calls((Place("a.py", 1, "<module>"),), True)
    assert find_use(place, [], lambda _: None).reaches == "unknown"
    assert find_use(place, [], lambda _: "def (").reaches == "unknown"
    deep = "y = model(x)" + ".a" * 3000 + "\n"
    assert find_use(place, [], lambda _: deep).reaches in ("unknown", "nothing")
    assert find_use(place, [], lambda _: "\n\nx = 1").reaches == "unknown"
