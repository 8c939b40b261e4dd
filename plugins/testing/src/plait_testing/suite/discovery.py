"""Is it found, are its options explained, does its mesh fit? Arithmetic and metadata: no ranks."""

import re

import attrs

from plait import PlaitError
from plait.host import compose, plugins
from plait_testing.errors import raises_about
from plait_testing.models import MODELS
from plait_testing.strategies import declared_distance, marked
from plait_testing.suite.capabilities import REFUSABLE, Capabilities, Layout


class Discovery(Capabilities):
    def test_declarations_name_things_that_exist(self) -> None:
        known = [*REFUSABLE, *(f"model {model}" for model in MODELS)]
        assert set(self.refuses) <= set(known), f"`refuses` knows {known}"
        for what, sentence in self.refuses.items():
            assert not re.search(sentence, "any"), f"{sentence!r} for {what} would match every sentence"
        assert any(f"model {model}" not in self.refuses for model in MODELS), "a strategy that trains no model"
        assert self.layouts[self.last].world > 1, "features are tried in the last layout, which needs several ranks"
        sharding = "parameter_sharding" in getattr(plugins.load(self.strategy), "claims", ())
        assert not sharding or type(self).held is not Capabilities.held, "a strategy that shards declares `held`"
        declared_distance(self.strategy)
        for name, layout in self.layouts.items():
            off, own = getattr(plugins.create(self.strategy, layout.options), "hooks_off", ()), marked(self.strategy)
            assert {*off} <= {*own}, f"`hooks_off` is {off!r}; its own hooks are {own}"
            assert 1 <= layout.world <= 4, f"layout {name!r} has {layout.world} ranks; the suite has 1 to 4"

    def test_layouts_have_two_degrees_of_every_axis(self) -> None:
        """So that what is declared in terms of degrees is checked at two degrees."""
        degrees = [self.degrees(layout) for layout in self.layouts.values()]
        for axis in self.axes:
            seen = {degree[axis] for degree in degrees if axis in degree}
            assert len(seen) > 1 or not seen, f"axis {axis!r} has degree {seen} in every layout: add one with another"

    def test_is_listed_from_metadata_alone(self) -> None:
        plugin = plugins.installed().get(self.strategy)
        assert plugin is not None, f"no distribution declares {self.strategy!r} in its entry points 'plait.strategies'"
        assert plugin.state == "ok", f"{plugin}: {plugin.state}"

    def test_its_module_is_light_and_its_hooks_fit(self) -> None:
        """Imported in a fresh interpreter: no torch, hooks that exist, arguments that they have."""
        assert plugins.probe(self.strategy)["state"] == "ok"

    def test_defaults_on_the_command_line_are_those_in_code(self) -> None:
        node = compose([f"strategy=[{self.strategy}]"]).strategy[self.strategy] or {}
        fields = {field.name: field for field in attrs.fields(plugins.load(self.strategy)) if field.init}
        assert set(node) == set(fields), f"conf/strategy/{self.strategy}.yaml and the fields of the class differ"
        options = {name: field.default for name, field in fields.items() if field.default is not attrs.NOTHING}
        plain = {k: v for k, v in options.items() if isinstance(v, bool | int | float | str | None)}
        assert {k: node[k] for k in plain} == plain, f"conf/strategy/{self.strategy}.yaml has other defaults"

    def test_a_typo_is_explained(self) -> None:
        fields = [field.name for field in attrs.fields(plugins.load(self.strategy)) if field.init]
        typo = fields[0] + "x" if fields else "option"
        with raises_about(f"strategy.{self.strategy}.{typo}", None, fields):
            plugins.create(self.strategy, {typo: 1})

    def test_a_value_of_the_wrong_type_is_refused(self) -> None:
        for field in attrs.fields(plugins.load(self.strategy)):
            if field.init and field.type in (int, float, bool, "int", "float", "bool"):
                with raises_about(f"strategy.{self.strategy}.{field.name}", "certainly not"):
                    plugins.create(self.strategy, {field.name: "certainly not"})

    def test_a_mesh_fits_or_is_refused_in_words(self, world: int) -> None:
        """With its default options and with those of every layout, at every world size up to 4."""
        for options in [{}, *(layout.options for layout in self.layouts.values())]:
            try:
                dense, *views = self._assembled(Layout(world, options))
            except PlaitError as error:
                said = str(error)
                assert len(said.splitlines()) == 1
                assert re.search(r"\w+=-?\d+|axis|axes|strategy|ranks?|view", said), said
                continue
            for axes in (dense, *views):
                product = 1
                for axis in axes:
                    product *= axis.degree
                assert not axes or product == world, f"{axes} does not factor {world} ranks"

    def test_every_layout_fits_its_world(self) -> None:
        for layout in self.layouts.values():
            self._assembled(layout)

    def test_adds_the_axes_that_it_declares(self) -> None:
        for layout in self.layouts.values():
            owner = self._assembly(layout).layout.owner
            added = {name for name, strategy in owner.items() if strategy == self.strategy}
            assert added == set(self.axes), f"`axes` says {sorted(self.axes)}, it adds {sorted(added)}"
