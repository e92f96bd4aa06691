//! The `bpf` system calls.

#![expect(unsafe_code, reason = "system calls without a safe wrapper")]

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::hash::Hash;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aya::Pod;
use aya_obj::generated::{bpf_attach_type, bpf_insn};

use super::object::ProgramSpec;

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_BTF_LOAD: libc::c_int = 18;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: libc::c_int = 21;
const BPF_MAP_FREEZE: libc::c_int = 22;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// The kernel's `BPF_OBJ_NAME_LEN`.
const NAME_LEN: usize = 16;
/// How many entries are read at once.
const BATCH: usize = 1024;
/// Enough for the verifier's words on any of the programs; only made where one is refused.
const VERIFIER_LOG: usize = 1 << 20;

/// `union bpf_attr` as the commands on map elements read it.
#[repr(C)]
struct MapElement {
    map_fd: u32,
    reserved: u32,
    key: u64,
    value_or_next_key: u64,
    flags: u64,
}

/// `union bpf_attr` as `BPF_MAP_LOOKUP_BATCH` reads it.
#[repr(C)]
struct MapBatch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    element_flags: u64,
    flags: u64,
}

/// `union bpf_attr` as `BPF_OBJ_GET_INFO_BY_FD` reads it.
#[repr(C)]
struct InfoByFd {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// `union bpf_attr` as `BPF_MAP_CREATE` reads it.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    name: [u8; NAME_LEN],
    ifindex: u32,
    btf_fd: u32,
    btf_key_type_id: u32,
    btf_value_type_id: u32,
}

/// `union bpf_attr` as `BPF_PROG_LOAD` reads it.
#[repr(C)]
struct ProgramLoad {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; NAME_LEN],
    ifindex: u32,
    expected_attach_type: u32,
}

/// `union bpf_attr` as `BPF_BTF_LOAD` reads it.
#[repr(C)]
struct BtfLoad {
    btf: u64,
    log: u64,
    btf_size: u32,
    log_size: u32,
    log_level: u32,
    reserved: u32,
}

/// `union bpf_attr` as `BPF_LINK_CREATE` reads it.
#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
}

/// `union bpf_attr` as `BPF_OBJ_PIN` and `BPF_OBJ_GET` read it.
#[repr(C)]
struct PinnedObject {
    path: u64,
    fd: u32,
    flags: u32,
}

/// `union bpf_attr` as `BPF_LINK_UPDATE` reads it.
#[repr(C)]
struct LinkUpdate {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// `struct bpf_link_info` up to the members of a link to a cgroup or a network namespace.
#[repr(C)]
#[derive(Default)]
struct RawLinkInfo {
    kind: u32,
    id: u32,
    program_id: u32,
    reserved: u32,
    /// The cgroup's id; of a link to a network namespace, the first half is the namespace's inode.
    target: [u32; 2],
    attach_type: u32,
    reserved2: u32,
}

/// `struct bpf_map_info` up to the flags.
#[repr(C)]
#[derive(Default)]
struct RawMapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: `attr` is a prefix of `union bpf_attr` that the command reads, of the size given; what it points to
    // lives through the call, as each caller below shows.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    // The result of bpf(2) is an int.
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result as RawFd)
    }
}

fn element<K, V>(map: BorrowedFd<'_>, key: *const K, value: *mut V, flags: u64) -> MapElement {
    MapElement {
        map_fd: map.as_raw_fd() as u32,
        reserved: 0,
        key: key.addr() as u64,
        value_or_next_key: value.addr() as u64,
        flags,
    }
}

/// Sets `key` to `value`. `flags` as in bpf(2).
pub(super) fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V, flags: u64) -> io::Result<()> {
    let mut attr = element(map, key, std::ptr::from_ref(value).cast_mut(), flags);
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Removes `key`; that it was not there is no error.
pub(super) fn delete<K: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<()> {
    let mut attr = element::<K, u8>(map, key, std::ptr::null_mut(), 0);
    absent_is_none(bpf(BPF_MAP_DELETE_ELEM, &mut attr)).map(drop)
}

/// Takes `key` out of a hash. Minimum kernel 5.14.
pub(super) fn take<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_AND_DELETE_ELEM, map, key)
}

/// Reads the value of `key`.
pub(super) fn get<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_ELEM, map, key)
}

fn read<K: Pod, V: Pod>(command: libc::c_int, map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = MaybeUninit::<V>::uninit();
    let mut attr = element(map, key, value.as_mut_ptr(), 0);
    // SAFETY: on success the kernel has written a whole value, and any bits are a valid `V`.
    Ok(absent_is_none(bpf(command, &mut attr))?.map(|_| unsafe { value.assume_init() }))
}

/// The key after `key`, or the first.
pub(super) fn next_key<K: Pod>(map: BorrowedFd<'_>, key: Option<&K>) -> io::Result<Option<K>> {
    let mut next = MaybeUninit::<K>::uninit();
    let key = key.map_or(std::ptr::null(), std::ptr::from_ref);
    let mut attr = element(map, key, next.as_mut_ptr(), 0);
    // SAFETY: as in `take`.
    Ok(absent_is_none(bpf(BPF_MAP_GET_NEXT_KEY, &mut attr))?.map(|_| unsafe { next.assume_init() }))
}

/// All keys of a map. Those that come or go meanwhile may or may not be among them.
pub(super) fn keys<K: Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<K>> {
    let mut keys = Vec::new();
    let mut next = next_key(map, None)?;
    while let Some(key) = next {
        next = next_key(map, Some(&key))?;
        keys.push(key);
    }
    Ok(keys)
}

/// All entries of a map that nobody else changes in the meantime.
pub(super) fn entries<K: Pod + Eq + Hash, V: Pod>(map: BorrowedFd<'_>) -> io::Result<HashMap<K, V>> {
    let mut all = HashMap::new();
    let mut last = next_key(map, None)?;
    while let Some(key) = last {
        last = next_key(map, Some(&key))?;
        if let Some(value) = get(map, &key)? {
            all.insert(key, value);
        }
    }
    Ok(all)
}

/// All entries of a hash that the kernel programs may change in the meantime. Minimum kernel 5.6.
pub(super) fn changing_entries<K: Pod + Eq + Hash, V: Pod>(map: BorrowedFd<'_>) -> io::Result<HashMap<K, V>> {
    let mut all = HashMap::new();
    let mut room = BATCH;
    // The kernel's word on where it is: the number of a bucket.
    let mut position: Option<u32> = None;
    loop {
        let (mut keys, mut values) = (Vec::<K>::with_capacity(room), Vec::<V>::with_capacity(room));
        let mut next = 0_u32;
        let mut attr = MapBatch {
            in_batch: position.as_ref().map_or(0, |at| std::ptr::from_ref(at).addr() as u64),
            out_batch: (&raw mut next).addr() as u64,
            keys: keys.as_mut_ptr().addr() as u64,
            values: values.as_mut_ptr().addr() as u64,
            count: room as u32,
            map_fd: map.as_raw_fd() as u32,
            element_flags: 0,
            flags: 0,
        };
        let result = bpf(BPF_MAP_LOOKUP_BATCH, &mut attr);
        let last = match result {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                // A bucket holds more than there was room for.
                room *= 2;
                continue;
            }
            Err(error) => return Err(error),
        };
        let count = (attr.count as usize).min(room);
        // SAFETY: the kernel has written so many keys and values, and any bits are valid ones.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        all.extend(keys.into_iter().zip(values));
        if last {
            return Ok(all);
        }
        position = Some(next);
    }
}

/// The values of an element of a per-CPU array, one for each possible CPU.
pub(super) fn get_per_cpu(map: BorrowedFd<'_>, index: u32) -> io::Result<Vec<u64>> {
    let cpus =
        aya::util::nr_cpus().map_err(|(path, error)| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    let mut values = vec![0_u64; cpus];
    let mut attr = element(map, &raw const index, values.as_mut_ptr(), 0);
    bpf(BPF_MAP_LOOKUP_ELEM, &mut attr)?;
    Ok(values)
}

/// The monotonic clock, by which the kernel programs tell time, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A value from the bytes of a ring's item; none where these are too few.
pub(super) fn from_bytes<T: Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: as many bytes are there, any bits are a valid `T`, and it is read unaligned.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

fn absent_is_none(result: io::Result<RawFd>) -> io::Result<Option<RawFd>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A map to be made.
#[derive(Clone, Copy)]
pub(super) struct MapSpec<'a> {
    pub(super) name: &'a str,
    pub(super) kind: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
    /// The BTF, and in it the ids of the key's and the value's type.
    pub(super) types: Option<(BorrowedFd<'a>, u32, u32)>,
}

/// Makes a map.
pub(super) fn create_map(spec: &MapSpec<'_>) -> io::Result<OwnedFd> {
    let mut attr = MapCreate {
        kind: spec.kind,
        key_size: spec.key_size,
        value_size: spec.value_size,
        max_entries: spec.max_entries,
        flags: spec.flags,
        name: object_name(spec.name),
        ..MapCreate::default()
    };
    if let Some((btf, key, value)) = spec.types {
        attr.btf_fd = btf.as_raw_fd() as u32;
        attr.btf_key_type_id = key;
        attr.btf_value_type_id = value;
    }
    made(bpf(BPF_MAP_CREATE, &mut attr))
}

/// Sets the value of `key` of a map whose keys are of 4 bytes; `value` is as long as the map's values.
pub(super) fn update_bytes(map: BorrowedFd<'_>, key: u32, value: &[u8]) -> io::Result<()> {
    let mut attr = element(map, &raw const key, value.as_ptr().cast_mut(), 0);
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Makes a map's contents final, and thereby constants to the verifier.
pub(super) fn freeze(map: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_MAP_FREEZE, &mut (map.as_raw_fd() as u32)).map(drop)
}

/// Loads type information.
pub(super) fn load_btf(btf: &[u8]) -> io::Result<OwnedFd> {
    let mut attr = BtfLoad {
        btf: btf.as_ptr().addr() as u64,
        log: 0,
        btf_size: btf.len() as u32,
        log_size: 0,
        log_level: 0,
        reserved: 0,
    };
    made(bpf(BPF_BTF_LOAD, &mut attr))
}

/// Why the kernel refused a program.
pub(super) struct Refused {
    pub(super) error: io::Error,
    /// The verifier's words.
    pub(super) log: String,
}

/// Loads a program.
pub(super) fn load_program(
    program: ProgramSpec,
    instructions: &[bpf_insn],
    licence: &CStr,
) -> Result<OwnedFd, Refused> {
    let mut attr = ProgramLoad {
        kind: program.kind as u32,
        instruction_count: instructions.len() as u32,
        instructions: instructions.as_ptr().addr() as u64,
        licence: licence.as_ptr().addr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: object_name(program.name),
        ifindex: 0,
        expected_attach_type: program.attach as u32,
    };
    let error = match made(bpf(BPF_PROG_LOAD, &mut attr)) {
        Ok(program) => return Ok(program),
        Err(error) => error,
    };
    // Once more, to hear why.
    let mut log = vec![0_u8; VERIFIER_LOG];
    attr.log_level = 1;
    attr.log_size = log.len() as u32;
    attr.log = log.as_mut_ptr().addr() as u64;
    match made(bpf(BPF_PROG_LOAD, &mut attr)) {
        // The first refusal was of a passing kind.
        Ok(program) => Ok(program),
        Err(_) => {
            let text = CStr::from_bytes_until_nul(&log).unwrap_or_default();
            Err(Refused {
                error,
                log: text.to_string_lossy().into_owned(),
            })
        }
    }
}

/// Attaches a program; closing the link detaches it. Minimum kernel 5.9.
pub(super) fn link(program: BorrowedFd<'_>, target: BorrowedFd<'_>, attach: bpf_attach_type) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: target.as_raw_fd() as u32,
        attach_type: attach as u32,
        flags: 0,
    };
    made(bpf(BPF_LINK_CREATE, &mut attr))
}

/// Puts another program into a link, at once: no connection meets neither. Minimum kernel 5.7.
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = LinkUpdate {
        link: link.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        flags: 0,
        old_program: 0,
    };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link, whoever else holds it. Minimum kernel 5.9.
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_LINK_DETACH, &mut (link.as_raw_fd() as u32)).map(drop)
}

/// Where a link leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkInfo {
    /// The id of its program.
    pub(super) program: u32,
    /// The id of its cgroup; zero where that is gone.
    pub(super) cgroup: u64,
    /// The inode of its network namespace; zero where that is gone.
    pub(super) netns: u32,
}

/// Asks where a link leads. Minimum kernel 5.8.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let info: RawLinkInfo = info(link)?;
    let [low, high] = info.target.map(u32::to_ne_bytes);
    let mut cgroup = [0; 8];
    cgroup[..4].copy_from_slice(&low);
    cgroup[4..].copy_from_slice(&high);
    Ok(LinkInfo {
        program: info.program_id,
        cgroup: u64::from_ne_bytes(cgroup),
        netns: info.target[0],
    })
}

/// What a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapInfo {
    pub(super) kind: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
}

/// Asks what a map is.
pub(super) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let info: RawMapInfo = info(map)?;
    Ok(MapInfo {
        kind: info.kind,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.flags,
    })
}

/// The kernel's number of a map, program or link.
pub(super) fn object_id(object: BorrowedFd<'_>) -> io::Result<u32> {
    // What the kernel tells of each of them begins with its type and its id.
    info::<[u32; 2]>(object).map(|[_, id]| id)
}

/// `T` is a prefix of what the kernel tells of such an object; plain integers.
fn info<T: Default>(object: BorrowedFd<'_>) -> io::Result<T> {
    let mut info = T::default();
    let mut attr = InfoByFd {
        fd: object.as_raw_fd() as u32,
        info_len: size_of::<T>() as u32,
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Gives an object a name in a bpffs, which keeps it.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinnedObject {
        path: path.as_ptr().addr() as u64,
        fd: object.as_raw_fd() as u32,
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens the object of that name in a bpffs, if there is one.
pub(super) fn pinned(path: &Path) -> io::Result<Option<OwnedFd>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinnedObject {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    match made(bpf(BPF_OBJ_GET, &mut attr)) {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A name as the kernel takes it: cut to its length.
fn object_name(name: &str) -> [u8; NAME_LEN] {
    let mut field = [0; NAME_LEN];
    // The kernel takes letters, digits, dots and underscores, and wants a zero at the end.
    for (to, from) in field[..NAME_LEN - 1].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    field
}

fn made(result: io::Result<RawFd>) -> io::Result<OwnedFd> {
    // SAFETY: a descriptor that the kernel has just made for us, and closes on exec.
    result.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
