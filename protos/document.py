"""Writes docs/reference.md from the comments of protos/pagecast/v1; with --check, compares instead and exits 1 on a difference.

Every service, method, message, field and enum value appears once, in the order of the files. The protos are the only source.
"""

import argparse
import importlib.resources
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "docs" / "reference.md"
HEAD = """# API reference

Generated from `protos/pagecast/v1` by `protos/document.py`; do not edit. [api.md](api.md) has the rules of requests in prose.
"""
_Field = pb.FieldDescriptorProto
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in _Field.Type.items()}
Path_ = tuple[int, ...]


def descriptors() -> pb.FileDescriptorSet:
    """All files with their comments."""
    from grpc_tools import protoc

    well_known = str(importlib.resources.files("grpc_tools") / "_proto")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pagecast/v1").glob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        words = ["protoc", f"-I{ROOT}", f"-I{well_known}", f"--descriptor_set_out={out.name}", "--include_source_info", *files]
        if protoc.main(words) != 0:
            raise SystemExit("protoc failed")
        return pb.FileDescriptorSet.FromString(Path(out.name).read_bytes())


class Document:
    """One file's part of the reference."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}

    def lines(self) -> Iterator[str]:
        """Markdown."""
        for i, service in enumerate(self._file.service):
            yield from self._service(service, (6, i))
        yield f"## {Path(self._file.name).name}\n"
        for i, message in enumerate(self._file.message_type):
            yield from self._message(message, (4, i))
        for i, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (5, i))

    def _text(self, path: Path_) -> str:
        return " ".join(self._comments.get(path, "").split())

    def _service(self, service: pb.ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"## {service.name}\n"
        yield f"`{self._file.package}.{service.name}`. {self._text(path)}\n"
        yield "| method | request | response | |"
        yield "| --- | --- | --- | --- |"
        for i, method in enumerate(service.method):
            response = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            yield f"| {method.name} | {_link(method.input_type)} | {response} | {_cell(self._text((*path, 2, i)))} |"
        yield ""

    def _message(self, message: pb.DescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {message.name}\n"
        if text := self._text(path):
            yield f"{text}\n"
        if not message.field:
            yield "No fields.\n"
            return
        yield "| field | type | number | |"
        yield "| --- | --- | --- | --- |"
        for i, field in enumerate(message.field):
            yield f"| {field.name} | {_type(message, field)} | {field.number} | {_cell(self._text((*path, 2, i)))} |"
        yield ""

    def _enum(self, enum: pb.EnumDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {enum.name}\n"
        if text := self._text(path):
            yield f"{text}\n"
        yield "| value | number | |"
        yield "| --- | --- | --- |"
        for i, value in enumerate(enum.value):
            yield f"| {value.name} | {value.number} | {_cell(self._text((*path, 2, i)))} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _link(name: str) -> str:
    short = name.rsplit(".", 1)[1]
    return f"[{short}](#{short.lower()})" if name.startswith(".pagecast.") else name.removeprefix(".google.protobuf.")


def _name(field: pb.FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else _SCALARS[field.type]


def _type(message: pb.DescriptorProto, field: pb.FieldDescriptorProto) -> str:
    name = _name(field)
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            return f"map of {_name(entry.field[0])} to {_name(entry.field[1])}"
    if field.label == _Field.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return f"{name}, one of {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead, and exit 1 on a difference")
    check = parser.parse_args().check
    made = "\n".join([HEAD, *(line for file in descriptors().file for line in Document(file).lines())]).rstrip() + "\n"
    if not check:
        OUT.write_text(made)
    elif not OUT.exists() or OUT.read_text() != made:
        raise SystemExit("docs/reference.md is out of date, run protos/document.py")


if __name__ == "__main__":
    main()
