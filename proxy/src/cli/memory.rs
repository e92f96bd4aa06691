//! How the allocator deals with the buffers of the data plane.

#![expect(unsafe_code, reason = "calls of the C library without a safe wrapper")]

/// Free memory that each of the allocator's heaps keeps at its end, in bytes.
const KEPT: libc::c_int = 8 << 20;
/// From this size on a block is a mapping of its own, in bytes; no buffer of the data plane is.
const MAPPED: libc::c_int = 4 << 20;
/// Heaps that threads share. By default there are eight for each core, and each thread that ever blocked leaves what it
/// has freed in its own, between what others still use.
const HEAPS: libc::c_int = 4;

/// A page of memory at its smallest.
const PAGE: usize = 4096;

/// Lets freed buffers stay with the process. By default the C library gives the end of a heap back to the kernel as
/// soon as it is as large as one buffer, and takes it again for the next: each time a page fault for every page.
pub(super) fn keep_freed_memory() {
    // SAFETY: parameters of the allocator, set before there are other threads.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_TOP_PAD, 256 << 10);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

unsafe extern "C" {
    /// Where the program's first byte is loaded, and the end of its code: both by the linker.
    #[link_name = "__executable_start"]
    static PROGRAM: u8;
    #[link_name = "etext"]
    static CODE_END: u8;
}

/// Lets go of what only the start needed: what it allocated, and its code. Pages of the program are mapped in wide
/// stretches around each that is used; those that are used again come back from the page cache, a fault for each stretch.
pub(super) fn forget_start() {
    give_back_freed_memory();
    let begin = (&raw const PROGRAM).addr();
    let pages = ((&raw const CODE_END).addr() - begin) & !(PAGE - 1);
    // SAFETY: the program's own file, mapped for reading only: what is let go of is read again from there.
    unsafe {
        libc::madvise((&raw const PROGRAM).cast_mut().cast(), pages, libc::MADV_DONTNEED);
    }
}

/// Gives all freed memory back to the kernel. Takes the longer the more there is; for a quiet moment.
pub(super) fn give_back_freed_memory() {
    // SAFETY: no arguments that could be wrong; other threads wait for their turn.
    unsafe {
        libc::malloc_trim(0);
    }
}
