//! The object with the kernel programs: its maps, made once, and its programs, loaded with the constants they are told.
//!
//! aya's own loader reads the type information of the whole kernel, probes for what only kernels lack that Adit does
//! not run on, and parses the object anew for every instance: a hundred milliseconds for each pod.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fmt::Display;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use aya_obj::btf::BtfFeatures;
use aya_obj::generated::{bpf_attach_type, bpf_insn, bpf_map_type, bpf_prog_type};
use aya_obj::{EbpfSectionKind, Map};

use super::error::at;
use super::pins::Pins;
use super::{LogScope, SteerError, probe, sys};

/// The kernel programs, built by `cargo xtask build-ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("ADIT_BPF_OBJECT"));

/// In the source register of an instruction that loads an address within a map's value.
const BPF_PSEUDO_MAP_VALUE: u8 = 2;

/// What the names of the maps that are pinned begin with.
const PINNED: &str = "adit_";

/// The kinds of types that BTF may hold: every kernel that Adit runs on knows all of them.
const BTF: BtfFeatures = BtfFeatures::new(true, true, true, true, true, true, true, true);

/// A program: its name in the object, and what it is to the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramSpec {
    pub(super) name: &'static str,
    pub(super) kind: bpf_prog_type,
    pub(super) attach: bpf_attach_type,
}

/// The parsed object and its maps.
pub(super) struct Object {
    parsed: aya_obj::Object,
    maps: HashMap<String, OwnedFd>,
}

impl Object {
    /// Parses the object and makes its maps, or opens those that are pinned. Where not all are, none of those that are
    /// serves: the programs in force work on the ones that are missing. These go on, beside what is made here.
    pub(super) fn open(
        log: &LogScope,
        pins: Option<&Pins>,
        map_entries: &HashMap<String, u32>,
    ) -> Result<Self, SteerError> {
        let mut parsed = aya_obj::Object::parse(OBJECT).map_err(bad)?;
        for (name, entries) in map_entries {
            if let Some(map) = parsed.maps.get_mut(name) {
                map.set_max_entries(*entries);
            }
        }
        if let Some(pins) = pins {
            let names = parsed.maps.keys().map(String::as_str);
            pins.set_aside_unless_whole(names.filter(|name| name.starts_with(PINNED)))?;
        }
        if *log == LogScope::None {
            // A constant to the verifier, which then drops the logging from the programs.
            let quiet = HashMap::from([("AYA_LOG_LEVEL", (&[0_u8][..], false))]);
            parsed.patch_map_data(quiet).map_err(bad)?;
        }
        let btf = parsed.fixup_and_sanitize_btf(&BTF).map_err(bad)?;
        let btf = btf.ok_or(SteerError::Missing("its type information"))?.to_bytes();
        let btf = sys::load_btf(&btf).map_err(at("telling the kernel the maps' types"))?;
        let mut maps = HashMap::new();
        for (name, map) in &parsed.maps {
            maps.insert(name.clone(), create(name, map, Some(btf.as_fd()), pins)?);
        }
        let definitions = parsed.maps.clone();
        let sections: HashSet<usize> = parsed.functions.keys().map(|(section, _)| *section).collect();
        let descriptors = definitions
            .iter()
            .map(|(name, map)| (name.as_str(), maps[name].as_raw_fd(), map));
        parsed.relocate_maps(descriptors, &sections).map_err(bad)?;
        parsed.relocate_calls(&sections).map_err(bad)?;
        Ok(Self { parsed, maps })
    }

    /// Another descriptor of a map.
    pub(super) fn map(&self, name: &'static str) -> Result<OwnedFd, SteerError> {
        let map = self.maps.get(name).ok_or(SteerError::Missing(name))?;
        map.try_clone().map_err(at("duplicating a map's descriptor"))
    }

    /// Loads a program.
    pub(super) fn load(&self, program: ProgramSpec) -> Result<OwnedFd, SteerError> {
        load(program, self.instructions(program)?, &self.parsed.license)
    }

    /// Makes a template of a program of which each instance has constants of its own.
    pub(super) fn into_template(mut self, program: ProgramSpec) -> Result<Template, SteerError> {
        let is_constants = |map: &Map| map.section_kind() == EbpfSectionKind::Rodata;
        let constants = self.parsed.maps.iter().find(|(_, map)| is_constants(map));
        let (name, _) = constants.ok_or(SteerError::Missing("its constants"))?;
        let (name, shared) = (name.clone(), self.maps[name].as_raw_fd());
        let instructions = self.instructions(program)?.to_vec();
        let loads = |at: &usize| {
            let instruction = &instructions[*at];
            instruction.src_reg() == BPF_PSEUDO_MAP_VALUE && instruction.imm == shared
        };
        let places = (0..instructions.len()).filter(loads).collect();
        self.parsed.btf = None;
        Ok(Template {
            program,
            instructions,
            places,
            constants: name,
            object: self,
        })
    }

    fn instructions(&self, program: ProgramSpec) -> Result<&[bpf_insn], SteerError> {
        let missing = || SteerError::Missing(program.name);
        let found = self.parsed.programs.get(program.name).ok_or_else(missing)?;
        let function = self.parsed.functions.get(&found.function_key());
        Ok(&function.ok_or_else(missing)?.instructions)
    }
}

/// A program to be loaded again and again, each time with other constants.
pub(super) struct Template {
    program: ProgramSpec,
    /// With descriptors of the shared maps in them, which the object holds open.
    instructions: Vec<bpf_insn>,
    /// The instructions that load an address within the constants.
    places: Vec<usize>,
    /// The name of the map of constants.
    constants: String,
    object: Object,
}

impl Template {
    /// The maps that are pinned.
    pub(super) fn pinned_maps(&self) -> impl Iterator<Item = (&str, &OwnedFd)> {
        let maps = self.object.maps.iter().map(|(name, map)| (name.as_str(), map));
        maps.filter(|(name, _)| name.starts_with(PINNED))
    }

    /// Loads an instance; `constants` are given by their names.
    pub(super) fn instantiate(&mut self, constants: HashMap<&str, &[u8]>) -> Result<OwnedFd, SteerError> {
        let parsed = &mut self.object.parsed;
        let constants = constants.into_iter().map(|(name, value)| (name, (value, true)));
        parsed.patch_map_data(constants.collect()).map_err(bad)?;
        let map = create(&self.constants, &parsed.maps[&self.constants], None, None)?;
        for at in &self.places {
            self.instructions[*at].imm = map.as_raw_fd();
        }
        load(self.program, &self.instructions, &parsed.license)
    }
}

/// Loads a program. Where the kernel refuses it and lacks something that Adit needs, the error is about that.
fn load(program: ProgramSpec, instructions: &[bpf_insn], licence: &CString) -> Result<OwnedFd, SteerError> {
    sys::load_program(program, instructions, licence).map_err(|refused| match probe::probe() {
        Err(missing) => missing,
        Ok(()) => SteerError::Program {
            program: program.name,
            error: refused.error,
            log: refused.log,
        },
    })
}

/// Makes a map, with its contents where the object has some. The maps that hold state are opened where they are pinned;
/// constants and the ring of log records belong to each process.
fn create(name: &str, map: &Map, btf: Option<BorrowedFd<'_>>, pins: Option<&Pins>) -> Result<OwnedFd, SteerError> {
    let failed = |error| match probe::probe() {
        Err(missing) => missing,
        Ok(()) => SteerError::MakeMap {
            name: name.to_owned(),
            error,
        },
    };
    let kind = map.map_type();
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    let max_entries = if kind == bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32 {
        // Whole pages, whose size the object cannot know.
        map.max_entries()
            .max(page.and_then(|page| page.try_into().ok()).unwrap_or(4096))
    } else {
        map.max_entries()
    };
    let types = match map {
        // The only maps that need to be told the types of keys and values; others cannot even be told.
        Map::Btf(btf_map) if kind == bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as u32 => {
            btf.map(|btf| (btf, btf_map.def.btf_key_type_id, btf_map.def.btf_value_type_id))
        }
        _ => None,
    };
    let spec = sys::MapSpec {
        name,
        kind,
        key_size: map.key_size(),
        value_size: map.value_size(),
        max_entries,
        flags: map.map_flags(),
        types,
    };
    let make = || sys::create_map(&spec).map_err(failed);
    let made = match pins {
        Some(pins) if name.starts_with(PINNED) => pins.map(&spec, make)?,
        _ => make()?,
    };
    if !map.data().is_empty() {
        sys::update_bytes(made.as_fd(), 0, map.data()).map_err(failed)?;
    }
    if map.section_kind() == EbpfSectionKind::Rodata {
        sys::freeze(made.as_fd()).map_err(failed)?;
    }
    Ok(made)
}

fn bad(error: impl Display) -> SteerError {
    SteerError::Object(error.to_string())
}
