//! Decodes a namespace descriptor. One that decodes must be consistent, and survive a round trip.
#![no_main]

use larder_format::NamespaceDescriptor;
use larder_format::codec::Reader;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Ok(descriptor) = NamespaceDescriptor::decode(&mut Reader::new(input)) {
        let geometry = descriptor.geometry;
        assert_eq!(geometry.part_table().iter().map(|&bytes| bytes as usize).sum::<usize>(), geometry.page_bytes());
        let mut again = Vec::new();
        descriptor.encode(&mut again);
        assert_eq!(NamespaceDescriptor::decode(&mut Reader::new(&again)).unwrap().id(), descriptor.id());
    }
});
