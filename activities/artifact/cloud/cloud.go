// Package cloud links the drivers of the object stores that an artifact URL may
// name beside file://: s3:// and gs://. Programs import it for that effect
// alone; it must hold nothing else, so that tests and agents stay small.
package cloud

import (
	_ "gocloud.dev/blob/gcsblob"
	_ "gocloud.dev/blob/s3blob"
)
