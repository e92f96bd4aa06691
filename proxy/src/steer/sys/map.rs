//! Maps and their elements.

#![expect(unsafe_code, reason = "the kernel writes keys and values")]

use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use aya::Pod;

use super::{NAME_LEN, bpf, info, made, object_name};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: libc::c_int = 21;
const BPF_MAP_FREEZE: libc::c_int = 22;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;

/// How many entries are read at once.
const BATCH: usize = 1024;

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
pub(in crate::steer) fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V, flags: u64) -> io::Result<()> {
    let mut attr = element(map, key, std::ptr::from_ref(value).cast_mut(), flags);
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Removes `key`; that it was not there is no error.
pub(in crate::steer) fn delete<K: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<()> {
    let mut attr = element::<K, u8>(map, key, std::ptr::null_mut(), 0);
    absent_is_none(bpf(BPF_MAP_DELETE_ELEM, &mut attr)).map(drop)
}

/// Takes `key` out of a hash. Minimum kernel 5.14.
pub(in crate::steer) fn take<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_AND_DELETE_ELEM, map, key)
}

/// Reads the value of `key`.
pub(in crate::steer) fn get<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    read(BPF_MAP_LOOKUP_ELEM, map, key)
}

fn read<K: Pod, V: Pod>(command: libc::c_int, map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = MaybeUninit::<V>::uninit();
    let mut attr = element(map, key, value.as_mut_ptr(), 0);
    // SAFETY: on success the kernel has written a whole value, and any bits are a valid `V`.
    Ok(absent_is_none(bpf(command, &mut attr))?.map(|_| unsafe { value.assume_init() }))
}

/// The key after `key`, or the first.
pub(in crate::steer) fn next_key<K: Pod>(map: BorrowedFd<'_>, key: Option<&K>) -> io::Result<Option<K>> {
    let mut next = MaybeUninit::<K>::uninit();
    let key = key.map_or(std::ptr::null(), std::ptr::from_ref);
    let mut attr = element(map, key, next.as_mut_ptr(), 0);
    // SAFETY: as in `take`.
    Ok(absent_is_none(bpf(BPF_MAP_GET_NEXT_KEY, &mut attr))?.map(|_| unsafe { next.assume_init() }))
}

/// All keys of a map. Those that come or go meanwhile may or may not be among them.
pub(in crate::steer) fn keys<K: Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<K>> {
    let mut keys = Vec::new();
    let mut next = next_key(map, None)?;
    while let Some(key) = next {
        next = next_key(map, Some(&key))?;
        keys.push(key);
    }
    Ok(keys)
}

/// All entries of a map that nobody else changes in the meantime.
pub(in crate::steer) fn entries<K: Pod + Eq + Hash, V: Pod>(map: BorrowedFd<'_>) -> io::Result<HashMap<K, V>> {
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
pub(in crate::steer) fn changing_entries<K: Pod + Eq + Hash, V: Pod>(map: BorrowedFd<'_>) -> io::Result<HashMap<K, V>> {
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
pub(in crate::steer) fn get_per_cpu(map: BorrowedFd<'_>, index: u32) -> io::Result<Vec<u64>> {
    let cpus =
        aya::util::nr_cpus().map_err(|(path, error)| io::Error::new(error.kind(), format!("{path}: {error}")))?;
    let mut values = vec![0_u64; cpus];
    let mut attr = element(map, &raw const index, values.as_mut_ptr(), 0);
    bpf(BPF_MAP_LOOKUP_ELEM, &mut attr)?;
    Ok(values)
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
pub(in crate::steer) struct MapSpec<'a> {
    pub(in crate::steer) name: &'a str,
    pub(in crate::steer) kind: u32,
    pub(in crate::steer) key_size: u32,
    pub(in crate::steer) value_size: u32,
    pub(in crate::steer) max_entries: u32,
    pub(in crate::steer) flags: u32,
    /// The BTF, and in it the ids of the key's and the value's type.
    pub(in crate::steer) types: Option<(BorrowedFd<'a>, u32, u32)>,
}

/// Makes a map.
pub(in crate::steer) fn create_map(spec: &MapSpec<'_>) -> io::Result<OwnedFd> {
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
pub(in crate::steer) fn update_bytes(map: BorrowedFd<'_>, key: u32, value: &[u8]) -> io::Result<()> {
    let mut attr = element(map, &raw const key, value.as_ptr().cast_mut(), 0);
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Makes a map's contents final, and thereby constants to the verifier.
pub(in crate::steer) fn freeze(map: BorrowedFd<'_>) -> io::Result<()> {
    bpf(BPF_MAP_FREEZE, &mut (map.as_raw_fd() as u32)).map(drop)
}

/// What a map is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::steer) struct MapInfo {
    pub(in crate::steer) kind: u32,
    pub(in crate::steer) key_size: u32,
    pub(in crate::steer) value_size: u32,
    pub(in crate::steer) max_entries: u32,
    pub(in crate::steer) flags: u32,
}

/// Asks what a map is.
pub(in crate::steer) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let info: RawMapInfo = info(map)?;
    Ok(MapInfo {
        kind: info.kind,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.flags,
    })
}
