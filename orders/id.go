package orders

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"time"
)

// idEpoch is where the 41 bits of milliseconds in an id begin; they last until 2094.
var idEpoch = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC).UnixMilli()

// idSpace is the number of ids of one millisecond: 63 bits less 41.
const idSpace = 1 << 22

var ids struct {
	sync.Mutex // guards both
	milli      int64
	rest       uint32
}

// NewID gives a positive id that is larger than every earlier one of this process and, at one millisecond's resolution, than those
// of other processes. Its lower 22 bits start at random each millisecond: processes share nothing, so two may draw the same id
// (one in four million for two ids of the same millisecond). Place draws again when that happens. Safe for concurrent use.
func NewID() int64 {
	ids.Lock()
	defer ids.Unlock()
	milli := time.Now().UnixMilli() - idEpoch
	if milli > ids.milli {
		ids.milli, ids.rest = milli, randomStart()
	} else if ids.rest++; ids.rest == idSpace {
		// The millisecond is used up, or the clock went back: borrow from the next one, so that ids keep rising.
		ids.milli, ids.rest = ids.milli+1, randomStart()
	}
	return ids.milli<<22 | int64(ids.rest)
}

// randomStart leaves the upper half of the space free for ids that follow in the same millisecond.
func randomStart() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	return binary.BigEndian.Uint32(b[:]) % (idSpace / 2)
}
