//! Fields of contexts, word by word: the kernel allows no wider access to most, and none through a copied pointer.

use core::ptr;

use adit_common::Addr;

/// Reads an address of four words.
///
/// # Safety
///
/// `field` points into the program's context, or to a map's value.
#[inline(always)]
pub unsafe fn read_addr(field: *const [u32; 4]) -> Addr {
    let field: *const u32 = field.cast();
    // SAFETY: the caller's promise; the verifier checks each access. Volatile, so that none are made into one.
    unsafe {
        Addr::v6([
            ptr::read_volatile(field),
            ptr::read_volatile(field.add(1)),
            ptr::read_volatile(field.add(2)),
            ptr::read_volatile(field.add(3)),
        ])
    }
}

/// Writes an address of four words.
///
/// # Safety
///
/// As for [`read_addr`].
#[inline(always)]
pub unsafe fn write_addr(field: *mut [u32; 4], addr: &Addr) {
    let field: *mut u32 = field.cast();
    // SAFETY: as above.
    unsafe {
        ptr::write_volatile(field, addr.words[0]);
        ptr::write_volatile(field.add(1), addr.words[1]);
        ptr::write_volatile(field.add(2), addr.words[2]);
        ptr::write_volatile(field.add(3), addr.words[3]);
    }
}
