// Says in the library which sources it was made of, so that one made of others is never used
// unnoticed.
extern "C" __attribute__((visibility("default"), used)) const char jitney_sources[] =
    JITNEY_SOURCES;
